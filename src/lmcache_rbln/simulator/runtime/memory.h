// SPDX-License-Identifier: Apache-2.0
//
// Device memory. An address given to torch lies beyond the end of a process's address space, so
// host code that touches it crashes; the bytes live in host pages found through a table.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "abi.h"
#include "npu.h"

namespace rbln_sim {

// 2^48: user space ends at 2^47 on x86-64 (at 2^48 on aarch64); nothing is mapped above unless a
// program asks for such an address by name.
constexpr uint64_t kDeviceBase = uint64_t{1} << 48;
// Each NPU has 16 TiB of addresses, handed out round and round: a freed address is not met again
// soon, so a stale pointer is found out.
constexpr int kWindowShift = 44;
constexpr uint64_t kWindow = uint64_t{1} << kWindowShift;
// One table slot covers 2 MiB of addresses; an allocation starts at a slot of its own.
constexpr int kSlotShift = 21;
constexpr uint64_t kSlot = uint64_t{1} << kSlotShift;

inline bool is_device_address(uint64_t address) {
  return address >= kDeviceBase && address < kDeviceBase + kMaxNpus * kWindow;
}

// One allocation. Objects are recycled, never deleted, so that a reader that comes late may look.
struct Region {
  std::atomic<uint32_t> pins{0};  // one of the owner, one of each copy or borrow in flight
  std::atomic<uint64_t> base{0};
  std::atomic<uint64_t> size{0};
  char* host = nullptr;
  Npu* npu = nullptr;
  uint32_t device = 0;
  Region* next_free = nullptr;
};

// Keeps the host pages of a piece of device memory while it lives.
class Pin {
 public:
  Pin() = default;
  Pin(Region* region, char* host) : region_(region), host_(host) {}
  Pin(Pin&& other) noexcept : region_(other.region_), host_(other.host_) {
    other.region_ = nullptr;
  }
  Pin& operator=(Pin&& other) noexcept;
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;
  ~Pin();

  explicit operator bool() const { return region_ != nullptr; }
  char* host() const { return host_; }
  Npu& npu() const { return *region_->npu; }
  uint32_t device() const { return region_->device; }
  uint64_t base() const { return region_->base.load(std::memory_order_relaxed); }
  uint64_t size() const { return region_->size.load(std::memory_order_relaxed); }

 private:
  Region* region_ = nullptr;
  char* host_ = nullptr;
};

class Memory {
 public:
  // The device must have been opened.
  RBLNRetCode allocate(uint32_t device, uint64_t size, uint64_t& vaddr, std::string& error);
  bool release(uint64_t vaddr);

  // Pins [vaddr, vaddr + bytes), which must lie within one allocation. Takes no lock.
  Pin pin(uint64_t vaddr, uint64_t bytes);
  // Why pin() found nothing.
  std::string explain(uint64_t vaddr, uint64_t bytes);

  void set_info(uint64_t base, rbln::DataType user, rbln::DataType physical,
                const std::vector<int64_t>& shape);
  void get_info(uint64_t base, rbln::MemoryInfo& info);

  rbln::MemoryStats stats(uint32_t device, int npu);
  rbln::MemoryStats stats(uint32_t device);
  void reset_accumulated(uint32_t device);
  void reset_peaks(uint32_t device);
  uint64_t live_regions();

  void unpin(Region* region);

 private:
  struct Layout {
    rbln::DataType user = rbln::DataType::Undefined;
    rbln::DataType physical = rbln::DataType::Undefined;
    std::vector<int64_t> shape;
  };
  struct Window {
    std::atomic<std::atomic<Region*>*> slots{nullptr};  // made at the NPU's first allocation
    std::map<uint64_t, uint64_t> live;                  // first slot -> one past the last
    uint64_t cursor = 0;
    rbln::MemoryStats stats;
  };

  uint64_t place(Window& window, uint64_t slots);
  Region* fresh_region();
  void count_in(rbln::MemoryStats& stats, uint64_t size);
  void count_out(rbln::MemoryStats& stats, uint64_t size);

  std::mutex mutex_;
  Window windows_[kMaxNpus];
  rbln::MemoryStats device_stats_[kMaxNpus];
  std::map<uint64_t, Layout> layouts_;
  Region* free_regions_ = nullptr;
  uint64_t live_ = 0;
};

Memory& memory();
// In a forked child: start anew; what the parent allocated is the parent's.
void renew_memory();

}  // namespace rbln_sim
