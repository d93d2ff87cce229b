// SPDX-License-Identifier: Apache-2.0
//
// What a submission costs: one engine an NPU and direction, each serving one submission at a time.
#pragma once

#include <cstdint>
#include <mutex>

#include "faults.h"

namespace rbln_sim {

enum class Direction { kH2V, kV2H, kV2V };
constexpr int kDirections = 3;

inline Call call_of(Direction direction) { return static_cast<Call>(direction); }

// Nanoseconds on CLOCK_MONOTONIC. Equal when nothing is modelled.
struct Slot {
  uint64_t start = 0;
  uint64_t end = 0;
};

class Engine {
 public:
  // Takes the engine for one submission that was ready at `ready_ns`. A submission that was queued
  // behind another starts at that one's modelled end, whenever the simulating thread wakes up.
  Slot take(Direction direction, uint64_t ready_ns, uint64_t bytes, uint64_t entries, bool bulk);

 private:
  std::mutex mutex_;
  uint64_t free_at_ = 0;
};

// The time at which the calling thread submits: now, less what its last sleep in serve() overshot.
// The overshoot is the simulation's, not the device's; without this, small submissions in a row
// would each be charged a wake-up of the kernel.
uint64_t submission_time();

// Sleeps until the slot's end.
void serve(const Slot& slot);

}  // namespace rbln_sim
