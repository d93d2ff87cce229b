// SPDX-License-Identifier: Apache-2.0
//
// The NPUs of the simulated host: which exist, who holds them, and how they are joined into the
// logical devices torch sees as rbln:0, rbln:1, ...
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "link.h"
#include "settings.h"

namespace rbln_sim {

struct Npu {
  int id = 0;                     // physical number on the simulated host
  std::atomic<bool> open{false};  // by this process
  std::atomic<bool> lost{false};
  std::atomic<uint64_t> losses{0};      // work queued before a loss is never done
  std::atomic<uint64_t> used_bytes{0};  // device memory allocated by this process
  int lock = -1;                        // socket that keeps other processes away
  Engine engines[kDirections];

  void lose() {
    ++losses;
    lost = true;
  }
  Engine& engine(Direction direction) { return engines[static_cast<int>(direction)]; }
};

class Host {
 public:
  Host();

  Npu& npu(int id) { return npus_[id]; }

  // Opens the NPUs (numbers as this process sees them) and joins them to a logical device.
  bool open(uint32_t device, const int* visible, int count, std::string& error);

  // The NPUs of a logical device; null when it was not opened.
  const std::vector<int>* group(uint32_t device) const;

  // The visible NPU's physical number, or -1 and a message.
  int physical(int visible, std::string& error) const;

  void revive();  // lost NPUs come back

  // After fork() the NPUs stay the parent's. Called in the child.
  void become_child(int parent);
  int parent() const { return parent_; }

 private:
  bool lock(Npu& npu, std::string& error);
  void unlock(Npu& npu);

  Npu npus_[kMaxNpus];
  std::atomic<const std::vector<int>*> groups_[kMaxNpus] = {};
  int parent_ = 0;  // process that had NPUs open when it forked this one
};

Host& host();

}  // namespace rbln_sim
