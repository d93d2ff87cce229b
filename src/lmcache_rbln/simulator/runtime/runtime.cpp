// SPDX-License-Identifier: Apache-2.0
//
// The entry points torch-rbln calls for devices, memory, copies, streams and events.
#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "abi.h"
#include "faults.h"
#include "memory.h"
#include "npu.h"
#include "settings.h"
#include "streams.h"
#include "telemetry.h"
#include "transfer.h"

namespace rbln_sim {
namespace {

constexpr RBLNRetCode kSuccess = RBLNRetCode_SUCCESS;
constexpr RBLNRetCode kFailure = RBLNRetCode_FAILURE;
constexpr RBLNRetCode kInvalid = RBLNRetCode_INVALID;

// Fits the 16 bytes of the properties; nobody should take it for silicon.
constexpr char kName[] = "RBLN-SIMULATED";
static_assert(sizeof(kName) <= sizeof(RBLNDeviceProperties::name), "name field");

// As the NPUs of the RBLN-CR generation; vLLM-RBLN 0.12.0 sizes its KV cache for just that many.
constexpr uint32_t kChiplets = 4;

// One chiplet's part of an NPU's bytes: every allocation lies evenly on all of them.
rbln::MemoryStats chiplet_share(rbln::MemoryStats stats) {
  for (uint64_t* bytes :
       {&stats.allocated_current, &stats.allocated_peak, &stats.allocated_total_allocated,
        &stats.allocated_total_freed, &stats.reserved_current, &stats.reserved_peak,
        &stats.reserved_total_allocated, &stats.reserved_total_freed, &stats.active_current,
        &stats.active_peak, &stats.cached_current, &stats.cached_peak}) {
    *bytes /= kChiplets;
  }
  return stats;
}

std::string not_opened(uint32_t device) {
  std::string text = "rbln:" + std::to_string(device) + " was not opened";
  if (host().parent()) {
    text += " in this process; what was opened before fork() stays with process " +
            std::to_string(host().parent()) + " (start workers with spawn)";
  }
  return text;
}

// The NPU of the device that is lost, or -1.
int lost_npu(const std::vector<int>& group) {
  for (int id : group) {
    if (host().npu(id).lost) return id;
  }
  return -1;
}

// False, and a line, when the device was not opened or is gone.
bool usable(const char* call, uint32_t device) {
  const std::vector<int>* group = host().group(device);
  if (!group) {
    complain("%s: %s", call, not_opened(device).c_str());
    return false;
  }
  const int lost = lost_npu(*group);
  if (lost >= 0) complain("%s: NPU %d is lost", call, lost);
  return lost < 0;
}

// Waiting calls: false when the call is to fail, or the device is gone.
bool may_wait(const char* call, uint32_t device) {
  counters().synchronize.fetch_add(1, std::memory_order_relaxed);
  const std::vector<int>* group = host().group(device);
  const Verdict verdict = consult_blocking(Call::kSync);
  if (verdict.action == Action::kLost && group) host().npu(group->front()).lose();
  if (verdict.action != Action::kNone) {
    complain("%s: failing as injected", call);
    return false;
  }
  return usable(call, device);
}

bool fail_late(const char* call, Stream& stream) {
  const std::string failure = stream.take_failure();
  if (failure.empty()) return false;
  complain("%s: asynchronous work on stream %u of rbln:%u had failed: %s", call, stream.number(),
           stream.device(), failure.c_str());
  return true;
}

RBLNRetCode allocate(const char* call, uint32_t device, uint64_t size, uint64_t& vaddr) {
  const Verdict verdict = consult_blocking(Call::kMalloc);
  const std::vector<int>* group = host().group(device);
  if (verdict.action == Action::kLost && group) host().npu(group->front()).lose();
  if (verdict.action != Action::kNone) {
    complain("%s: failing as injected", call);
    return kFailure;
  }
  if (!usable(call, device)) return kFailure;
  std::string error;
  const RBLNRetCode result = memory().allocate(device, size, vaddr, error);
  if (result != kSuccess) {
    complain("%s: %s", call, error.c_str());
    return result;
  }
  counters().malloc.fetch_add(1, std::memory_order_relaxed);
  return kSuccess;
}

struct Borrows {
  std::mutex mutex;
  std::unordered_map<uint64_t, Pin> open;
  uint64_t last = 0;
};

std::atomic<Borrows*> all_borrows{new Borrows};

// torch-rbln hands device memory to the host this way when an operation has no kernel. Assumed to
// be ordered like a synchronous copy.
RBLNRetCode borrow(const char* call, uint64_t vaddr, uint64_t size, uint64_t& address,
                   uint64_t& id) {
  Pin pin = memory().pin(vaddr, size);
  if (!pin) {
    complain("%s: %s", call, memory().explain(vaddr, size).c_str());
    return kInvalid;
  }
  const Verdict verdict = consult_blocking(Call::kBorrow);
  if (verdict.action == Action::kLost) pin.npu().lose();
  if (verdict.action != Action::kNone || pin.npu().lost) {
    complain("%s: %s", call,
             verdict.action != Action::kNone ? "failing as injected" : "the NPU is lost");
    return kFailure;
  }
  Stream& stream = current_stream(pin.device());
  stream.wait(stream.submitted());
  if (fail_late(call, stream)) return kFailure;
  counters().borrow.add(1, size);
  address = reinterpret_cast<uint64_t>(pin.host());
  Borrows& borrows = *all_borrows.load(std::memory_order_acquire);
  std::lock_guard<std::mutex> guard(borrows.mutex);
  id = ++borrows.last;
  borrows.open.emplace(id, std::move(pin));
  return kSuccess;
}

bool valid_query(const char* call, int npu, int& id) {
  if (!settings().error.empty()) {
    complain("%s: %s", call, settings().error.c_str());
    return false;
  }
  std::string error;
  id = host().physical(npu, error);
  if (id >= 0) return true;
  complain("%s: %s", call, error.c_str());
  return false;
}

}  // namespace

void renew_borrows() { all_borrows = new Borrows; }

}  // namespace rbln_sim

using rbln_sim::complain;
using rbln_sim::Direction;
using rbln_sim::host;
using rbln_sim::memory;

// --- NPUs -----------------------------------------------------------------------------------

RBLNRetCode rbln_get_device_count(int* count) {
  *count = 0;
  if (!rbln_sim::settings().error.empty()) {
    complain("rbln_get_device_count: %s", rbln_sim::settings().error.c_str());
    return RBLNRetCode_FAILURE;
  }
  std::vector<int> npus;
  std::string error;
  if (!rbln_sim::visible_npus(npus, error)) {
    complain("rbln_get_device_count: %s", error.c_str());
    return RBLNRetCode_FAILURE;
  }
  *count = static_cast<int>(npus.size());
  return RBLNRetCode_SUCCESS;
}

RBLNRetCode rbln_register_device_id(int torch_device, int* npus, int count) {
  std::string error = rbln_sim::settings().error;
  const rbln_sim::Verdict verdict = rbln_sim::consult_blocking(rbln_sim::Call::kOpen);
  if (verdict.action == rbln_sim::Action::kLost && count > 0) {
    const int id = host().physical(npus[0], error);
    if (id >= 0) host().npu(id).lose();
  }
  if (verdict.action != rbln_sim::Action::kNone && error.empty()) error = "failing as injected";
  if (!error.empty() || !host().open(static_cast<uint32_t>(torch_device), npus, count, error)) {
    complain("rbln_register_device_id: rbln:%d: %s", torch_device, error.c_str());
    return RBLNRetCode_FAILURE;
  }
  rbln_sim::counters().open.fetch_add(1, std::memory_order_relaxed);
  return RBLNRetCode_SUCCESS;
}

// Answers without opening the NPU. torch-rbln's error text for a failure allows that the real
// runtime may need to ("absent or held by another process").
RBLNRetCode rbln_get_device_properties(int npu, RBLNDeviceProperties* properties) {
  int id;
  if (!rbln_sim::valid_query("rbln_get_device_properties", npu, id)) return RBLNRetCode_FAILURE;
  std::memset(properties, 0, sizeof(*properties));
  std::memcpy(properties->name, rbln_sim::kName, sizeof(rbln_sim::kName));
  properties->total_memory = rbln_sim::settings().memory_bytes;
  properties->memory_per_chiplet = rbln_sim::settings().memory_bytes / rbln_sim::kChiplets;
  properties->num_chiplet = rbln_sim::kChiplets;
  return RBLNRetCode_SUCCESS;
}

RBLNRetCode rbln_get_device_memory_info(int npu, RBLNDeviceMemoryInfo* info) {
  int id;
  if (!rbln_sim::valid_query("rbln_get_device_memory_info", npu, id)) return RBLNRetCode_FAILURE;
  std::memset(info, 0, sizeof(*info));
  info->total = rbln_sim::settings().memory_bytes;
  info->used = host().npu(id).used_bytes;
  info->free = info->total - info->used;
  info->granularity = 4096;
  info->num_chiplet = rbln_sim::kChiplets;
  const uint64_t total = info->total / rbln_sim::kChiplets;
  const uint64_t used = info->used / rbln_sim::kChiplets;
  for (uint32_t c = 0; c < rbln_sim::kChiplets; ++c) {
    info->chiplets[c] = {total, used, total - used, total - used, 0};
  }
  return RBLNRetCode_SUCCESS;
}

RBLNRetCode rbln_empty_cache(int) { return RBLNRetCode_SUCCESS; }  // nothing is cached

RBLNRetCode rbln_reset_accumulated_memory_stats(int torch_device) {
  memory().reset_accumulated(static_cast<uint32_t>(torch_device));
  return RBLNRetCode_SUCCESS;
}

RBLNRetCode rbln_reset_peak_memory_stats(int torch_device) {
  memory().reset_peaks(static_cast<uint32_t>(torch_device));
  return RBLNRetCode_SUCCESS;
}

rbln::MemoryStats rbln_get_memory_stats(int torch_device) {
  return memory().stats(static_cast<uint32_t>(torch_device));
}

std::vector<std::vector<rbln::MemoryStats>> rbln_get_memory_stats_per_chiplet(int torch_device) {
  std::vector<std::vector<rbln::MemoryStats>> stats;
  if (const std::vector<int>* group = host().group(static_cast<uint32_t>(torch_device))) {
    for (int id : *group) {
      stats.emplace_back(rbln_sim::kChiplets, rbln_sim::chiplet_share(memory().stats(
                                                  static_cast<uint32_t>(torch_device), id)));
    }
  }
  return stats;
}

namespace rbln {

// --- memory ---------------------------------------------------------------------------------

// The vendor's header says of the lazy call that it takes no memory yet. Here it does, so that
// running out shows where the memory was asked for.
RBLNRetCode rbln_malloc_lazy(uint32_t torch_device, uint64_t size, uint64_t& vaddr) {
  return rbln_sim::allocate("rbln_malloc_lazy", torch_device, size, vaddr);
}

RBLNRetCode rbln_malloc_eager(uint32_t torch_device, uint64_t size, uint64_t& vaddr) {
  return rbln_sim::allocate("rbln_malloc_eager", torch_device, size, vaddr);
}

// Frees on a lost device too: the bookkeeping is the host's.
RBLNRetCode rbln_free(uint64_t vaddr) {
  if (memory().release(vaddr)) {
    rbln_sim::counters().free.fetch_add(1, std::memory_order_relaxed);
    return RBLNRetCode_SUCCESS;
  }
  // Tensors a forked child inherited are the parent's; letting go of them is no mistake.
  if (host().parent() && rbln_sim::is_device_address(vaddr)) return RBLNRetCode_SUCCESS;
  complain("rbln_free: 0x%llx is not the start of an allocation",
           static_cast<unsigned long long>(vaddr));
  return RBLNRetCode_INVALID;
}

RBLNRetCode rbln_mark_zeros(uint64_t vaddr) {
  rbln_sim::Pin pin = memory().pin(vaddr, 1);
  if (!pin || pin.base() != vaddr) {
    complain("rbln_mark_zeros: 0x%llx is not the start of an allocation",
             static_cast<unsigned long long>(vaddr));
    return RBLNRetCode_INVALID;
  }
  rbln_sim::Stream& stream = rbln_sim::current_stream(pin.device());
  stream.wait(stream.submitted());
  // Fresh anonymous pages read as zeros.
  if (madvise(pin.host(), (pin.size() + 4095) & ~uint64_t{4095}, MADV_DONTNEED) != 0) {
    std::memset(pin.host(), 0, pin.size());
  }
  return RBLNRetCode_SUCCESS;
}

RBLNRetCode rbln_set_memory_info(uint64_t vaddr, DataType user, DataType physical,
                                 const std::vector<int64_t>& shape) {
  rbln_sim::Pin pin = memory().pin(vaddr, 1);
  if (!pin) {
    complain("rbln_set_memory_info: %s", memory().explain(vaddr, 1).c_str());
    return RBLNRetCode_INVALID;
  }
  memory().set_info(pin.base(), user, physical, shape);
  return RBLNRetCode_SUCCESS;
}

RBLNRetCode rbln_get_memory_info(uint64_t vaddr, MemoryInfo& info) {
  rbln_sim::Pin pin = memory().pin(vaddr, 1);
  if (!pin) {
    complain("rbln_get_memory_info: %s", memory().explain(vaddr, 1).c_str());
    return RBLNRetCode_INVALID;
  }
  info.torch_device_id = pin.device();
  info.key_vaddr = pin.base();
  memory().get_info(pin.base(), info);
  return RBLNRetCode_SUCCESS;
}

RBLNRetCode rbln_get_torch_device_id_from_vaddr(uint64_t vaddr, uint32_t& torch_device) {
  rbln_sim::Pin pin = memory().pin(vaddr, 1);
  if (!pin) {
    complain("rbln_get_torch_device_id_from_vaddr: %s", memory().explain(vaddr, 1).c_str());
    return RBLNRetCode_INVALID;
  }
  torch_device = pin.device();
  return RBLNRetCode_SUCCESS;
}

// Device memory is flat here from the start: binding it, or laying it out like another
// allocation, has nothing to do but to check the address.
RBLNRetCode rbln_set_raw_memory_alloc(uint64_t vaddr, uint64_t size) {
  if (memory().pin(vaddr, size)) return RBLNRetCode_SUCCESS;
  complain("rbln_set_raw_memory_alloc: %s", memory().explain(vaddr, size).c_str());
  return RBLNRetCode_INVALID;
}

RBLNRetCode rbln_set_device_alloc_layout_like(uint64_t vaddr, uint64_t like) {
  for (uint64_t address : {vaddr, like}) {
    if (memory().pin(address, 1)) continue;
    complain("rbln_set_device_alloc_layout_like: %s", memory().explain(address, 1).c_str());
    return RBLNRetCode_INVALID;
  }
  return RBLNRetCode_SUCCESS;
}

RBLNRetCode rbln_set_file_offloading_enabled(bool) { return RBLNRetCode_SUCCESS; }

RBLNRetCode rbln_release_offload_temp_storage(uint64_t* files) {
  *files = 0;
  return RBLNRetCode_SUCCESS;
}

RBLNRetCode rbln_v_borrow_host_ptr(uint64_t vaddr, uint64_t size, uint64_t& host_address,
                                   uint64_t& borrow) {
  return rbln_sim::borrow("rbln_v_borrow_host_ptr", vaddr, size, host_address, borrow);
}

RBLNRetCode rbln_v_acquire_host_ptr_for_overwrite(uint64_t vaddr, uint64_t size,
                                                  uint64_t& host_address, uint64_t& borrow) {
  return rbln_sim::borrow("rbln_v_acquire_host_ptr_for_overwrite", vaddr, size, host_address,
                          borrow);
}

RBLNRetCode rbln_v_return_borrowed(uint64_t borrow, bool) {
  rbln_sim::Borrows& borrows = *rbln_sim::all_borrows.load(std::memory_order_acquire);
  rbln_sim::Pin last;
  std::lock_guard<std::mutex> guard(borrows.mutex);
  auto found = borrows.open.find(borrow);
  if (found == borrows.open.end()) {
    complain("rbln_v_return_borrowed: %llu was not borrowed or was returned before",
             static_cast<unsigned long long>(borrow));
    return RBLNRetCode_INVALID;
  }
  last = std::move(found->second);
  borrows.open.erase(found);
  return RBLNRetCode_SUCCESS;
}

// --- copies ---------------------------------------------------------------------------------

RBLNRetCode rbln_memcpy_h2v(uint64_t host_address, uint64_t vaddr, uint64_t size) {
  return rbln_sim::copy(Direction::kH2V, "rbln_memcpy_h2v", host_address, vaddr, size);
}

RBLNRetCode rbln_memcpy_v2h(uint64_t vaddr, uint64_t host_address, uint64_t size) {
  return rbln_sim::copy(Direction::kV2H, "rbln_memcpy_v2h", vaddr, host_address, size);
}

RBLNRetCode rbln_memcpy_v2v(uint64_t source, uint64_t destination, uint64_t size) {
  return rbln_sim::copy(Direction::kV2V, "rbln_memcpy_v2v", source, destination, size);
}

RBLNRetCode rbln_memcpy_h2v_async(uint64_t host_address, uint64_t vaddr, uint64_t size,
                                  uint64_t* handle) {
  return rbln_sim::copy_async(Direction::kH2V, "rbln_memcpy_h2v_async", host_address, vaddr, size,
                              handle);
}

RBLNRetCode rbln_memcpy_v2h_async(uint64_t vaddr, uint64_t host_address, uint64_t size,
                                  uint64_t* handle) {
  return rbln_sim::copy_async(Direction::kV2H, "rbln_memcpy_v2h_async", vaddr, host_address, size,
                              handle);
}

RBLNRetCode rbln_memcpy_v2v_async(uint64_t source, uint64_t destination, uint64_t size,
                                  uint64_t* handle) {
  return rbln_sim::copy_async(Direction::kV2V, "rbln_memcpy_v2v_async", source, destination, size,
                              handle);
}

RBLNRetCode rbln_memcpy_h2v_multi(const CopyOps& ops) {
  return rbln_sim::copy_bulk(Direction::kH2V, "rbln_memcpy_h2v_multi", ops);
}

RBLNRetCode rbln_memcpy_v2h_multi(const CopyOps& ops) {
  return rbln_sim::copy_bulk(Direction::kV2H, "rbln_memcpy_v2h_multi", ops);
}

RBLNRetCode rbln_memcpy_v2v_multi(const CopyOps& ops) {
  return rbln_sim::copy_bulk(Direction::kV2V, "rbln_memcpy_v2v_multi", ops);
}

// --- streams and events ---------------------------------------------------------------------

RBLNRetCode rbln_stream_create(uint32_t torch_device, uint64_t* stream) {
  rbln_sim::Stream* made = rbln_sim::create_stream(torch_device);
  if (!made) {
    complain("rbln_stream_create: %s", rbln_sim::not_opened(torch_device).c_str());
    return RBLNRetCode_INVALID;
  }
  *stream = made->handle();
  return RBLNRetCode_SUCCESS;
}

static rbln_sim::Stream* known(const char* call, uint64_t stream) {
  rbln_sim::Stream* found = rbln_sim::find_stream(stream);
  if (!found) complain("%s: no stream 0x%llx", call, static_cast<unsigned long long>(stream));
  return found;
}

static bool known(const char* call, uint64_t event, rbln_sim::Mark& mark) {
  if (rbln_sim::find_event(event, mark)) return true;
  complain("%s: no event 0x%llx", call, static_cast<unsigned long long>(event));
  return false;
}

RBLNRetCode rbln_stream_query(uint64_t stream, bool* done) {
  const char* const call = "rbln_stream_query";
  rbln_sim::Stream* found = known(call, stream);
  if (!found) return RBLNRetCode_INVALID;
  if (!rbln_sim::usable(call, found->device())) return RBLNRetCode_FAILURE;
  *done = found->idle();
  return RBLNRetCode_SUCCESS;
}

RBLNRetCode rbln_stream_synchronize(uint64_t stream) {
  const char* const call = "rbln_stream_synchronize";
  rbln_sim::Stream* found = known(call, stream);
  if (!found) return RBLNRetCode_INVALID;
  if (!rbln_sim::may_wait(call, found->device())) return RBLNRetCode_FAILURE;
  found->wait(found->submitted());
  return rbln_sim::fail_late(call, *found) ? RBLNRetCode_FAILURE : RBLNRetCode_SUCCESS;
}

RBLNRetCode rbln_stream_wait_event(uint64_t stream, uint64_t event) {
  const char* const call = "rbln_stream_wait_event";
  rbln_sim::Stream* waiting = known(call, stream);
  rbln_sim::Mark mark;
  if (!waiting || !known(call, event, mark)) return RBLNRetCode_INVALID;
  // An event that was never recorded, or that lies behind on the same stream, holds nothing up.
  if (!mark.stream || mark.stream == waiting || mark.stream->reached(mark.position)) {
    return RBLNRetCode_SUCCESS;
  }
  waiting->submit(
      [mark](uint64_t) {
        mark.stream->wait(mark.position);
        return uint64_t{0};
      },
      false);
  return RBLNRetCode_SUCCESS;
}

RBLNRetCode rbln_get_current_stream(uint32_t torch_device, uint64_t* stream) {
  if (!host().group(torch_device)) {
    complain("rbln_get_current_stream: %s", rbln_sim::not_opened(torch_device).c_str());
    return RBLNRetCode_INVALID;
  }
  *stream = rbln_sim::current_stream(torch_device).handle();
  return RBLNRetCode_SUCCESS;
}

RBLNRetCode rbln_set_current_stream(uint32_t torch_device, uint64_t stream) {
  if (rbln_sim::device_of(stream) == torch_device && rbln_sim::select_stream(stream)) {
    return RBLNRetCode_SUCCESS;
  }
  complain("rbln_set_current_stream: rbln:%u has no stream 0x%llx", torch_device,
           static_cast<unsigned long long>(stream));
  return RBLNRetCode_INVALID;
}

RBLNRetCode rbln_event_create(uint32_t torch_device, uint64_t* event) {
  if (!host().group(torch_device)) {
    complain("rbln_event_create: %s", rbln_sim::not_opened(torch_device).c_str());
    return RBLNRetCode_INVALID;
  }
  *event = rbln_sim::create_event(torch_device);
  return RBLNRetCode_SUCCESS;
}

RBLNRetCode rbln_event_destroy(uint64_t event) {
  if (rbln_sim::destroy_event(event) || host().parent()) return RBLNRetCode_SUCCESS;
  complain("rbln_event_destroy: no event 0x%llx", static_cast<unsigned long long>(event));
  return RBLNRetCode_INVALID;
}

RBLNRetCode rbln_event_record(uint64_t event, uint64_t stream) {
  rbln_sim::Stream* found = known("rbln_event_record", stream);
  if (!found) return RBLNRetCode_INVALID;
  if (rbln_sim::record_event(event, *found)) return RBLNRetCode_SUCCESS;
  complain("rbln_event_record: no event 0x%llx", static_cast<unsigned long long>(event));
  return RBLNRetCode_INVALID;
}

RBLNRetCode rbln_event_query(uint64_t event, bool* done) {
  rbln_sim::Mark mark;
  const char* const call = "rbln_event_query";
  if (!known(call, event, mark)) return RBLNRetCode_INVALID;
  if (!rbln_sim::usable(call, rbln_sim::device_of(event))) return RBLNRetCode_FAILURE;
  *done = !mark.stream || mark.stream->reached(mark.position);
  return RBLNRetCode_SUCCESS;
}

RBLNRetCode rbln_event_synchronize(uint64_t event) {
  const char* const call = "rbln_event_synchronize";
  rbln_sim::Mark mark;
  if (!known(call, event, mark)) return RBLNRetCode_INVALID;
  if (!rbln_sim::may_wait(call, rbln_sim::device_of(event))) return RBLNRetCode_FAILURE;
  if (!mark.stream) return RBLNRetCode_SUCCESS;
  mark.stream->wait(mark.position);
  return rbln_sim::fail_late(call, *mark.stream) ? RBLNRetCode_FAILURE : RBLNRetCode_SUCCESS;
}

RBLNRetCode rbln_device_synchronize(uint32_t torch_device) {
  const char* const call = "rbln_device_synchronize";
  if (!rbln_sim::may_wait(call, torch_device)) return RBLNRetCode_FAILURE;
  const std::string failure = rbln_sim::drain_device(torch_device);
  if (failure.empty()) return RBLNRetCode_SUCCESS;
  complain("%s: asynchronous work on rbln:%u had failed: %s", call, torch_device, failure.c_str());
  return RBLNRetCode_FAILURE;
}

// --- what memory_stats() prints -------------------------------------------------------------

uint64_t MemoryStats::GetAllocatedCurrent() const { return allocated_current; }
uint64_t MemoryStats::GetAllocatedPeak() const { return allocated_peak; }
uint64_t MemoryStats::GetAllocatedTotalAllocated() const { return allocated_total_allocated; }
uint64_t MemoryStats::GetAllocatedTotalFreed() const { return allocated_total_freed; }
uint64_t MemoryStats::GetReservedCurrent() const { return reserved_current; }
uint64_t MemoryStats::GetReservedPeak() const { return reserved_peak; }
uint64_t MemoryStats::GetReservedTotalAllocated() const { return reserved_total_allocated; }
uint64_t MemoryStats::GetReservedTotalFreed() const { return reserved_total_freed; }
uint64_t MemoryStats::GetActiveCurrent() const { return active_current; }
uint64_t MemoryStats::GetActivePeak() const { return active_peak; }
uint64_t MemoryStats::GetCachedCurrent() const { return cached_current; }
uint64_t MemoryStats::GetCachedPeak() const { return cached_peak; }
uint64_t MemoryStats::GetNumAllocRetries() const { return num_alloc_retries; }
uint64_t MemoryStats::GetNumOoms() const { return num_ooms; }
uint64_t MemoryStats::GetNumDeviceAlloc() const { return num_device_alloc; }
uint64_t MemoryStats::GetNumDeviceFree() const { return num_device_free; }

std::map<std::string, uint64_t> MemoryStats::GetMemoryStats() const {
  return {
      {"allocated.current", allocated_current},
      {"allocated.peak", allocated_peak},
      {"allocated.total_allocated", allocated_total_allocated},
      {"allocated.total_freed", allocated_total_freed},
      {"reserved.current", reserved_current},
      {"reserved.peak", reserved_peak},
      {"reserved.total_allocated", reserved_total_allocated},
      {"reserved.total_freed", reserved_total_freed},
      {"active.current", active_current},
      {"active.peak", active_peak},
      {"cached.current", cached_current},
      {"cached.peak", cached_peak},
      {"num_alloc_retries", num_alloc_retries},
      {"num_ooms", num_ooms},
      {"num_device_alloc", num_device_alloc},
      {"num_device_free", num_device_free},
  };
}

}  // namespace rbln
