// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/prctl.h>
#include <time.h>

#include <cerrno>
#include <cstdint>

namespace rbln_sim {

inline uint64_t clock_ns(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

inline uint64_t now_ns() { return clock_ns(CLOCK_MONOTONIC); }

// Gives the CPU away until the time has come.
inline void sleep_until(uint64_t when_ns) {
  // Linux rounds sleeps up by 50 us unless the thread asks otherwise.
  static thread_local bool fine = prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0) == 0;
  (void)fine;
  const timespec t{static_cast<time_t>(when_ns / 1000000000u),
                   static_cast<long>(when_ns % 1000000000u)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, nullptr) == EINTR) {
  }
}

}  // namespace rbln_sim
