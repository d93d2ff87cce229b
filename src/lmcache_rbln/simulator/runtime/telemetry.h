// SPDX-License-Identifier: Apache-2.0
//
// What was done: counters, and the trace (one JSON line a submission).
#pragma once

#include <atomic>
#include <cstdint>

#include "link.h"

namespace rbln_sim {

struct Count {
  std::atomic<uint64_t> submissions{0};
  std::atomic<uint64_t> entries{0};
  std::atomic<uint64_t> bytes{0};

  void add(uint64_t more_entries, uint64_t more_bytes) {
    submissions.fetch_add(1, std::memory_order_relaxed);
    entries.fetch_add(more_entries, std::memory_order_relaxed);
    bytes.fetch_add(more_bytes, std::memory_order_relaxed);
  }
};

struct Counters {
  Count h2v;
  Count v2h;
  Count v2v;
  Count borrow;
  std::atomic<uint64_t> synchronize{0};
  std::atomic<uint64_t> malloc{0};
  std::atomic<uint64_t> free{0};
  std::atomic<uint64_t> open{0};

  Count& of(Direction direction) {
    return direction == Direction::kH2V ? h2v : direction == Direction::kV2H ? v2h : v2v;
  }
};

Counters& counters();
void reset_counters();

// Times a submission for the trace; costs nothing when there is none.
class Trace {
 public:
  Trace();
  void submission(const char* kind, uint64_t entries, uint64_t bytes, int npu, uint32_t device,
                  uint32_t stream, const Slot& slot, bool asynchronous);

 private:
  bool on_;
  uint64_t start_ns_ = 0;
  uint64_t process_cpu_ns_ = 0;
  uint64_t thread_cpu_ns_ = 0;
};

}  // namespace rbln_sim
