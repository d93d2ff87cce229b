// SPDX-License-Identifier: Apache-2.0
#include "link.h"

#include <algorithm>

#include "clock.h"
#include "settings.h"

namespace rbln_sim {
namespace {

// More than a late wake-up of an otherwise idle machine: a thread that was kept waiting longer
// than this competed for the CPU, which is the workload's business.
constexpr uint64_t kMaxOvershootNs = 100000;

thread_local uint64_t overshoot_ns = 0;

}  // namespace

Slot Engine::take(Direction direction, uint64_t ready_ns, uint64_t bytes, uint64_t entries,
                  bool bulk) {
  const Settings& s = settings();
  const double gbps = direction == Direction::kV2V ? s.d2d_gbps : s.link_gbps;
  double cost = s.submit_us * 1e3;
  if (bulk) cost += s.entry_us * 1e3 * static_cast<double>(entries);
  if (gbps > 0) cost += static_cast<double>(bytes) / gbps;  // bytes / (GB/s) is nanoseconds
  std::lock_guard<std::mutex> guard(mutex_);
  const uint64_t start = std::max(ready_ns, free_at_);
  free_at_ = start + static_cast<uint64_t>(cost);
  return {start, free_at_};
}

uint64_t submission_time() {
  const uint64_t late = overshoot_ns;
  overshoot_ns = 0;
  return now_ns() - late;
}

void serve(const Slot& slot) {
  if (now_ns() < slot.end) sleep_until(slot.end);
  overshoot_ns = std::min(now_ns() - slot.end, kMaxOvershootNs);
}

}  // namespace rbln_sim
