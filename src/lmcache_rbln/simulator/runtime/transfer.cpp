// SPDX-License-Identifier: Apache-2.0
#include "transfer.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "clock.h"
#include "memory.h"
#include "settings.h"
#include "streams.h"
#include "telemetry.h"

namespace rbln_sim {
namespace {

constexpr size_t kMaxV2VEntries = 1024;  // torch-rbln 0.12.0 sends at most this many

// A checked copy: addresses to copy between, and what keeps them.
struct Job {
  Pin source_pin;
  Pin destination_pin;
  const char* source = nullptr;
  char* destination = nullptr;
  uint64_t bytes = 0;

  const Pin& device_side() const { return destination_pin ? destination_pin : source_pin; }
  void run(uint64_t limit) const {
    if (settings().copy) std::memmove(destination, source, std::min(bytes, limit));
  }
  // What a wrong copy leaves behind: the halves of what was written, exchanged.
  void exchange_halves() const {
    char* middle = destination + bytes / 2;
    if (settings().copy) std::swap_ranges(destination, middle, middle);
  }
  // As run(), but through the kernel, which sees when the host's memory is gone; false then. A
  // program may free it, or end, before an asynchronous copy is done.
  bool run_guarded(uint64_t limit) const;
};

bool Job::run_guarded(uint64_t limit) const {
  limit = std::min(bytes, limit);
  if ((source_pin && destination_pin) || !settings().copy) {
    run(limit);
    return true;
  }
  for (uint64_t done = 0; done < limit;) {
    const iovec from{const_cast<char*>(source) + done, limit - done};
    const iovec to{destination + done, limit - done};
    const ssize_t moved = source_pin ? process_vm_writev(getpid(), &from, 1, &to, 1, 0)
                                     : process_vm_readv(getpid(), &to, 1, &from, 1, 0);
    if (moved > 0) {
      done += static_cast<uint64_t>(moved);
    } else if (moved == 0 || errno == EFAULT) {
      return false;
    } else {
      run(limit);  // not offered here, as in some containers
      return true;
    }
  }
  return true;
}

const char* label(Direction direction) { return name_of(call_of(direction)); }

bool host_side(const char* call, const char* side, uint64_t address, uint64_t bytes) {
  if (address && !is_device_address(address)) return true;
  complain("%s: %s 0x%llx (%llu bytes) is %s, expected host memory", call, side,
           static_cast<unsigned long long>(address), static_cast<unsigned long long>(bytes),
           address ? "a device address" : "null");
  return false;
}

bool device_side(const char* call, const char* side, uint64_t address, uint64_t bytes, Pin& pin) {
  pin = memory().pin(address, bytes);
  if (pin) return true;
  complain("%s: %s %s", call, side, memory().explain(address, bytes).c_str());
  return false;
}

bool prepare(Direction direction, const char* call, uint64_t source, uint64_t destination,
             uint64_t bytes, Job& job) {
  if (!bytes) {
    complain("%s: a copy of 0 bytes", call);
    return false;
  }
  job.bytes = bytes;
  if (direction == Direction::kH2V) {
    if (!host_side(call, "source", source, bytes)) return false;
    job.source = reinterpret_cast<const char*>(source);
  } else {
    if (!device_side(call, "source", source, bytes, job.source_pin)) return false;
    job.source = job.source_pin.host();
  }
  if (direction == Direction::kV2H) {
    if (!host_side(call, "destination", destination, bytes)) return false;
    job.destination = reinterpret_cast<char*>(destination);
  } else {
    if (!device_side(call, "destination", destination, bytes, job.destination_pin)) return false;
    job.destination = job.destination_pin.host();
  }
  if (direction == Direction::kV2V && job.source_pin.device() != job.destination_pin.device()) {
    complain("%s: source is on rbln:%u, destination on rbln:%u; only copies within a device", call,
             job.source_pin.device(), job.destination_pin.device());
    return false;
  }
  return true;
}

bool usable(const char* call, const Npu& npu) {
  if (!npu.lost) return true;
  complain("%s: NPU %d is lost", call, npu.id);
  return false;
}

// What is to happen to this call: false when it is to fail at once. `limit` is lowered when only
// part of the bytes is to be copied before it fails.
bool allowed(const Verdict& verdict, const char* call, Npu& npu, uint64_t bytes, uint64_t& limit) {
  limit = bytes;
  switch (verdict.action) {
    case Action::kFail:
      complain("%s: failing as injected", call);
      return false;
    case Action::kLost:
      npu.lose();
      complain("%s: NPU %d is lost from here on, as injected", call, npu.id);
      return false;
    case Action::kShort:
      limit = bytes / 2;
      return true;
    default:
      return usable(call, npu);
  }
}

// Nothing of [a, a + a_bytes) is in [b, b + b_bytes).
bool apart(uint64_t a, uint64_t a_bytes, uint64_t b, uint64_t b_bytes) {
  return a + a_bytes <= b || b + b_bytes <= a;
}

// Entries of a bulk call run in no particular order: destinations must not overlap each other.
// The device does not check this.
bool destinations_apart(const char* call, const rbln::CopyOps& ops) {
  const auto destination = [&](size_t i) { return std::get<1>(ops[i]); };
  const auto clash = [&](size_t i, size_t j) {
    if (apart(destination(i), std::get<2>(ops[i]), destination(j), std::get<2>(ops[j]))) {
      return false;
    }
    complain("%s: destinations of entries %zu (0x%llx+%llu) and %zu (0x%llx+%llu) overlap", call, i,
             static_cast<unsigned long long>(destination(i)),
             static_cast<unsigned long long>(std::get<2>(ops[i])), j,
             static_cast<unsigned long long>(destination(j)),
             static_cast<unsigned long long>(std::get<2>(ops[j])));
    return true;
  };
  std::vector<size_t> order(ops.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  const auto before = [&](size_t i, size_t j) { return destination(i) < destination(j); };
  // Ascending already, as a rule.
  if (!std::is_sorted(order.begin(), order.end(), before)) {
    std::sort(order.begin(), order.end(), before);
  }
  for (size_t i = 1; i < order.size(); ++i) {
    if (clash(order[i - 1], order[i])) return false;
  }
  return true;
}

// Waits for what the calling thread queued on its current stream; false when that had failed.
bool settle(const char* call, Stream& stream) {
  stream.wait(stream.submitted());
  const std::string failure = stream.take_failure();
  if (failure.empty()) return true;
  complain("%s: asynchronous work queued before it had failed: %s", call, failure.c_str());
  return false;
}

}  // namespace

RBLNRetCode copy(Direction direction, const char* call, uint64_t source, uint64_t destination,
                 uint64_t bytes) {
  Trace trace;
  Job job;
  if (!prepare(direction, call, source, destination, bytes, job)) return RBLNRetCode_INVALID;
  Npu& npu = job.device_side().npu();
  const uint32_t device = job.device_side().device();
  uint64_t limit;
  const Verdict verdict = consult_blocking(call_of(direction));
  if (!allowed(verdict, call, npu, bytes, limit)) return RBLNRetCode_FAILURE;
  Stream& stream = current_stream(device);
  if (!settle(call, stream)) return RBLNRetCode_FAILURE;

  Slot slot;
  const bool modelled = settings().modelled();
  if (modelled) slot = npu.engine(direction).take(direction, submission_time(), limit, 1, false);
  job.run(limit);
  if (verdict.action == Action::kWrong) job.exchange_halves();
  if (modelled) serve(slot);
  if (limit < bytes) {
    complain("%s: failing after %llu of %llu bytes, as injected", call,
             static_cast<unsigned long long>(limit), static_cast<unsigned long long>(bytes));
    return RBLNRetCode_FAILURE;
  }
  counters().of(direction).add(1, bytes);
  trace.submission(label(direction), 1, bytes, npu.id, device, stream.number(), slot, false);
  return RBLNRetCode_SUCCESS;
}

RBLNRetCode copy_async(Direction direction, const char* call, uint64_t source, uint64_t destination,
                       uint64_t bytes, uint64_t* handle) {
  auto job = std::make_shared<Job>();
  if (!prepare(direction, call, source, destination, bytes, *job)) return RBLNRetCode_INVALID;
  Npu& npu = job->device_side().npu();
  const uint32_t device = job->device_side().device();
  uint64_t limit;
  const Verdict verdict = consult(call_of(direction));
  if (!allowed(verdict, call, npu, bytes, limit)) return RBLNRetCode_FAILURE;
  Stream& stream = current_stream(device);
  auto work = [=, &npu, &stream, losses = npu.losses.load()](uint64_t ready_ns) {
    Trace trace;
    if (verdict.action == Action::kHang) {
      hang(verdict);
      ready_ns = now_ns();
    }
    // Who waits is told of a failure; unless faults were cleared since, and with them all that
    // hung on them.
    const auto fail = [&](std::string reason) {
      if (verdict.era == fault_era()) stream.fail(std::move(reason));
    };
    if (npu.losses != losses) {
      fail(std::string(call) + ": NPU " + std::to_string(npu.id) + " was lost before it was done");
      return uint64_t{0};
    }
    Slot slot;
    const bool modelled = settings().modelled();
    if (modelled) slot = npu.engine(direction).take(direction, ready_ns, limit, 1, false);
    const bool reached = job->run_guarded(limit);
    if (reached && verdict.action == Action::kWrong) job->exchange_halves();
    if (modelled) serve(slot);
    if (!reached) {
      fail(std::string(call) + ": its host memory was freed before it was done");
    } else if (limit < bytes) {
      fail(std::string(call) + ": " + std::to_string(limit) + " of " + std::to_string(bytes) +
           " bytes were copied, as injected");
    } else {
      counters().of(direction).add(1, bytes);
      trace.submission(label(direction), 1, bytes, npu.id, device, stream.number(), slot, true);
    }
    return slot.end;
  };
  try {
    const uint64_t position = stream.submit(std::move(work), true);
    if (handle) *handle = position;
  } catch (const std::exception& error) {  // no thread to be had
    complain("%s: cannot queue work: %s", call, error.what());
    return RBLNRetCode_FAILURE;
  }
  return RBLNRetCode_SUCCESS;
}

RBLNRetCode copy_bulk(Direction direction, const char* call, const rbln::CopyOps& ops) {
  Trace trace;
  if (ops.empty()) {
    complain("%s: no entries", call);
    return RBLNRetCode_INVALID;
  }
  if (direction == Direction::kV2V && ops.size() > kMaxV2VEntries) {
    complain("%s: %zu entries, at most %zu in one call", call, ops.size(), kMaxV2VEntries);
    return RBLNRetCode_INVALID;
  }
  std::vector<Job> jobs(ops.size());
  uint64_t bytes = 0;
  for (size_t i = 0; i < ops.size(); ++i) {
    const auto& [source, destination, size] = ops[i];
    if (!prepare(direction, call, source, destination, size, jobs[i])) return RBLNRetCode_INVALID;
    bytes += size;
    if (jobs[i].device_side().device() != jobs[0].device_side().device()) {
      complain("%s: entry %zu is on rbln:%u, entry 0 on rbln:%u", call, i,
               jobs[i].device_side().device(), jobs[0].device_side().device());
      return RBLNRetCode_INVALID;
    }
  }
  if (!destinations_apart(call, ops)) return RBLNRetCode_INVALID;

  Npu& npu = jobs[0].device_side().npu();
  const uint32_t device = jobs[0].device_side().device();
  uint64_t limit;
  const Verdict verdict = consult_blocking(call_of(direction));
  if (!allowed(verdict, call, npu, bytes, limit)) return RBLNRetCode_FAILURE;
  Stream& stream = current_stream(device);
  if (!settle(call, stream)) return RBLNRetCode_FAILURE;
  // The vendor measured that the device's bulk host copy times out in the kernel driver above a
  // size: 24 entries of 12 MiB together pass, 32 of 16 MiB do not.
  const Settings& s = settings();
  if (direction != Direction::kV2V && (ops.size() > s.bulk_entries || bytes > s.bulk_bytes)) {
    complain("%s: timed out (%zu entries, %llu bytes; the limit is %llu entries, %llu bytes)", call,
             ops.size(), static_cast<unsigned long long>(bytes),
             static_cast<unsigned long long>(s.bulk_entries),
             static_cast<unsigned long long>(s.bulk_bytes));
    return RBLNRetCode_FAILURE;
  }

  Slot slot;
  const bool modelled = s.modelled();
  if (modelled) {
    slot = npu.engine(direction).take(direction, submission_time(), limit, ops.size(), true);
  }
  uint64_t left = limit;
  for (const Job& job : jobs) {
    job.run(left);
    if (verdict.action == Action::kWrong) job.exchange_halves();
    left -= std::min(left, job.bytes);
  }
  if (modelled) serve(slot);
  if (limit < bytes) {
    complain("%s: failing after %llu of %llu bytes, as injected", call,
             static_cast<unsigned long long>(limit), static_cast<unsigned long long>(bytes));
    return RBLNRetCode_FAILURE;
  }
  counters().of(direction).add(ops.size(), bytes);
  trace.submission(label(direction), ops.size(), bytes, npu.id, device, stream.number(), slot,
                   false);
  return RBLNRetCode_SUCCESS;
}

}  // namespace rbln_sim
