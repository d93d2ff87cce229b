// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <iterator>

namespace rbln_sim {
namespace {

constexpr uint64_t kSlotsOfWindow = kWindow >> kSlotShift;
constexpr uint64_t kPage = 4096;

// Never destroyed: threads may still copy while the process exits.
std::atomic<Memory*> instance{new Memory};

uint64_t pages(uint64_t size) { return (size + kPage - 1) & ~(kPage - 1); }

std::string hex(uint64_t value) {
  char digits[24];
  std::snprintf(digits, sizeof(digits), "0x%llx", static_cast<unsigned long long>(value));
  return digits;
}

void* map_pages(uint64_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return at == MAP_FAILED ? nullptr : at;
}

}  // namespace

Memory& memory() { return *instance.load(std::memory_order_acquire); }

void renew_memory() { instance = new Memory; }

Pin& Pin::operator=(Pin&& other) noexcept {
  std::swap(region_, other.region_);
  std::swap(host_, other.host_);
  return *this;
}

Pin::~Pin() {
  if (region_) memory().unpin(region_);
}

// Next fit from where the last allocation ended.
uint64_t Memory::place(Window& window, uint64_t slots) {
  for (int round = 0; round < 2; ++round) {
    uint64_t at = round ? 0 : window.cursor;
    auto next = window.live.lower_bound(at);
    if (next != window.live.begin()) at = std::max(at, std::prev(next)->second);
    while (true) {
      const uint64_t limit = next == window.live.end() ? kSlotsOfWindow : next->first;
      if (at + slots <= limit) return at;
      if (next == window.live.end()) break;
      at = next->second;
      ++next;
    }
  }
  return kSlotsOfWindow;
}

Region* Memory::fresh_region() {
  if (!free_regions_) return new Region;
  Region* region = free_regions_;
  free_regions_ = region->next_free;
  return region;
}

void Memory::count_in(rbln::MemoryStats& s, uint64_t size) {
  s.allocated_current += size;
  s.allocated_total_allocated += size;
  s.allocated_peak = std::max(s.allocated_peak, s.allocated_current);
  s.active_current += size;
  s.active_peak = std::max(s.active_peak, s.active_current);
  s.reserved_current += pages(size);
  s.reserved_total_allocated += pages(size);
  s.reserved_peak = std::max(s.reserved_peak, s.reserved_current);
  ++s.num_device_alloc;
}

void Memory::count_out(rbln::MemoryStats& s, uint64_t size) {
  s.allocated_current -= size;
  s.allocated_total_freed += size;
  s.active_current -= size;
  s.reserved_current -= pages(size);
  s.reserved_total_freed += pages(size);
  ++s.num_device_free;
}

RBLNRetCode Memory::allocate(uint32_t device, uint64_t size, uint64_t& vaddr, std::string& error) {
  const std::vector<int>* group = host().group(device);
  if (!size) {
    error = "an allocation of 0 bytes";
    return RBLNRetCode_INVALID;
  }
  std::lock_guard<std::mutex> guard(mutex_);
  // An allocation lives on one NPU (torch-rbln: "one tensor still lives on one NPU"); which one of
  // a group is not documented: here the first that has room.
  uint64_t most_free = 0;
  for (int id : *group) {
    Npu& npu = host().npu(id);
    Window& window = windows_[id];
    const uint64_t free = settings().memory_bytes - npu.used_bytes.load();
    most_free = std::max(most_free, free);
    if (size > settings().memory_bytes || pages(size) > free) continue;
    std::atomic<Region*>* table = window.slots.load(std::memory_order_relaxed);
    if (!table) {
      table = static_cast<std::atomic<Region*>*>(map_pages(kSlotsOfWindow * sizeof(*table)));
      window.slots.store(table, std::memory_order_release);
    }
    void* pages_at = table ? map_pages(pages(size)) : nullptr;
    if (!pages_at) {
      error = "the host has no address space for " + std::to_string(size) + " bytes";
      return RBLNRetCode_FAILURE;
    }
    // A guard slot after each allocation: running off its end never meets another one.
    const uint64_t slots = (size >> kSlotShift) + 1;
    const uint64_t first = place(window, slots);
    if (first == kSlotsOfWindow) {
      munmap(pages_at, pages(size));
      continue;
    }
    window.cursor = first + slots;
    window.live[first] = first + slots;
    Region* region = fresh_region();
    vaddr = kDeviceBase + static_cast<uint64_t>(id) * kWindow + (first << kSlotShift);
    region->host = static_cast<char*>(pages_at);
    region->npu = &npu;
    region->device = device;
    region->base.store(vaddr, std::memory_order_relaxed);
    region->size.store(size, std::memory_order_relaxed);
    region->pins.store(1, std::memory_order_release);
    for (uint64_t slot = 0; slot < slots; ++slot) {
      table[first + slot].store(region, std::memory_order_release);
    }
    npu.used_bytes += pages(size);
    count_in(window.stats, size);
    count_in(device_stats_[device], size);
    ++live_;
    return RBLNRetCode_SUCCESS;
  }
  ++device_stats_[device].num_ooms;
  ++windows_[group->front()].stats.num_ooms;
  error = "rbln:" + std::to_string(device) + " is out of memory: " + std::to_string(size) +
          " bytes asked, " + std::to_string(most_free) + " of " +
          std::to_string(settings().memory_bytes) + " free on its emptiest NPU";
  return RBLNRetCode_FAILURE;
}

bool Memory::release(uint64_t vaddr) {
  Pin found = pin(vaddr, 1);
  if (!found || found.base() != vaddr) return false;
  Region* region = nullptr;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    const int id = found.npu().id;
    Window& window = windows_[id];
    const uint64_t first =
        (vaddr - kDeviceBase - static_cast<uint64_t>(id) * kWindow) >> kSlotShift;
    auto live = window.live.find(first);
    if (live == window.live.end()) return false;  // another thread was faster
    std::atomic<Region*>* table = window.slots.load(std::memory_order_relaxed);
    region = table[first].load(std::memory_order_relaxed);
    for (uint64_t slot = first; slot < live->second; ++slot) {
      table[slot].store(nullptr, std::memory_order_release);
    }
    window.live.erase(live);
    layouts_.erase(vaddr);
    count_out(window.stats, found.size());
    count_out(device_stats_[found.device()], found.size());
    --live_;
  }
  unpin(region);
  return true;
}

Pin Memory::pin(uint64_t vaddr, uint64_t bytes) {
  if (!is_device_address(vaddr)) return {};
  const uint64_t offset = vaddr - kDeviceBase;
  std::atomic<Region*>* table =
      windows_[offset >> kWindowShift].slots.load(std::memory_order_acquire);
  if (!table) return {};
  Region* region = table[(offset & (kWindow - 1)) >> kSlotShift].load(std::memory_order_acquire);
  if (!region) return {};
  uint32_t pins = region->pins.load(std::memory_order_relaxed);
  do {
    if (!pins) return {};
  } while (!region->pins.compare_exchange_weak(pins, pins + 1, std::memory_order_acquire));
  // The object may have been recycled for another allocation since the slot was read.
  const uint64_t base = region->base.load(std::memory_order_relaxed);
  const uint64_t size = region->size.load(std::memory_order_relaxed);
  if (vaddr < base || bytes > size || vaddr - base > size - bytes) {
    unpin(region);
    return {};
  }
  return Pin(region, region->host + (vaddr - base));
}

std::string Memory::explain(uint64_t vaddr, uint64_t bytes) {
  const std::string range = hex(vaddr) + "+" + std::to_string(bytes);
  if (!is_device_address(vaddr)) return range + " is not a device address";
  if (Pin inside = pin(vaddr, 0)) {
    return range + " runs past the end of its allocation (" + hex(inside.base()) + "+" +
           std::to_string(inside.size()) + ")";
  }
  if (host().parent()) {
    return range + " is not allocated here; NPUs opened before fork() stay with process " +
           std::to_string(host().parent()) + " (start workers with spawn)";
  }
  return range + " is not allocated (freed, or never was)";
}

void Memory::unpin(Region* region) {
  if (region->pins.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  const uint64_t size = pages(region->size.load(std::memory_order_relaxed));
  munmap(region->host, size);
  region->npu->used_bytes -= size;
  std::lock_guard<std::mutex> guard(mutex_);
  region->next_free = free_regions_;
  free_regions_ = region;
}

void Memory::set_info(uint64_t base, rbln::DataType user, rbln::DataType physical,
                      const std::vector<int64_t>& shape) {
  std::lock_guard<std::mutex> guard(mutex_);
  layouts_[base] = {user, physical, shape};
}

void Memory::get_info(uint64_t base, rbln::MemoryInfo& info) {
  std::lock_guard<std::mutex> guard(mutex_);
  auto found = layouts_.find(base);
  const Layout layout = found == layouts_.end() ? Layout{} : found->second;
  info.user_dtype = layout.user;
  info.physical_dtype = layout.physical;
  info.user_shape = layout.shape;
  info.physical_shape = layout.shape;
}

rbln::MemoryStats Memory::stats(uint32_t device) {
  std::lock_guard<std::mutex> guard(mutex_);
  return device < kMaxNpus ? device_stats_[device] : rbln::MemoryStats{};
}

rbln::MemoryStats Memory::stats(uint32_t device, int npu) {
  (void)device;  // an NPU belongs to one logical device
  std::lock_guard<std::mutex> guard(mutex_);
  return windows_[npu].stats;
}

void Memory::reset_accumulated(uint32_t device) {
  std::lock_guard<std::mutex> guard(mutex_);
  auto reset = [](rbln::MemoryStats& s) {
    s.allocated_total_allocated = s.allocated_total_freed = 0;
    s.reserved_total_allocated = s.reserved_total_freed = 0;
    s.num_alloc_retries = s.num_ooms = s.num_device_alloc = s.num_device_free = 0;
  };
  if (device < kMaxNpus) reset(device_stats_[device]);
  if (const std::vector<int>* group = host().group(device)) {
    for (int id : *group) reset(windows_[id].stats);
  }
}

void Memory::reset_peaks(uint32_t device) {
  std::lock_guard<std::mutex> guard(mutex_);
  auto reset = [](rbln::MemoryStats& s) {
    s.allocated_peak = s.allocated_current;
    s.reserved_peak = s.reserved_current;
    s.active_peak = s.active_current;
    s.cached_peak = s.cached_current;
  };
  if (device < kMaxNpus) reset(device_stats_[device]);
  if (const std::vector<int>* group = host().group(device)) {
    for (int id : *group) reset(windows_[id].stats);
  }
}

uint64_t Memory::live_regions() {
  std::lock_guard<std::mutex> guard(mutex_);
  return live_;
}

}  // namespace rbln_sim
