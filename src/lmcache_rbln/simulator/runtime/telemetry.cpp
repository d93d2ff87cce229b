// SPDX-License-Identifier: Apache-2.0
#include "telemetry.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "clock.h"
#include "settings.h"

namespace rbln_sim {
namespace {

// Lines of several processes end up in one file: each is one appending write.
int trace_file() {
  static const int file = [] {
    const std::string& path = settings().trace;
    if (path.empty()) return -1;
    const int opened = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (opened < 0) complain("RBLN_SIM_TRACE=%s: %s", path.c_str(), std::strerror(errno));
    return opened;
  }();
  return file;
}

}  // namespace

Counters& counters() {
  static Counters* c = new Counters;
  return *c;
}

void reset_counters() {
  Counters& c = counters();
  for (Count* count : {&c.h2v, &c.v2h, &c.v2v, &c.borrow}) {
    count->submissions = 0;
    count->entries = 0;
    count->bytes = 0;
  }
  c.synchronize = 0;
  c.malloc = 0;
  c.free = 0;
  c.open = 0;
}

Trace::Trace() : on_(trace_file() >= 0) {
  if (!on_) return;
  start_ns_ = now_ns();
  process_cpu_ns_ = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
  thread_cpu_ns_ = clock_ns(CLOCK_THREAD_CPUTIME_ID);
}

void Trace::submission(const char* kind, uint64_t entries, uint64_t bytes, int npu, uint32_t device,
                       uint32_t stream, const Slot& slot, bool asynchronous) {
  if (!on_) return;
  const uint64_t cpu = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
  const uint64_t own = clock_ns(CLOCK_THREAD_CPUTIME_ID) - thread_cpu_ns_;
  const uint64_t end_ns = now_ns();
  // Where a cost is modelled the engine was busy in its slot, else as long as the copy took.
  const bool modelled = slot.end > slot.start;
  char line[512];
  const int length = std::snprintf(
      line, sizeof(line),
      "{\"time\": %.6f, \"kind\": \"%s\", \"entries\": %llu, \"bytes\": %llu, \"npu\": %d, "
      "\"device\": %u, \"stream\": %u, \"async\": %s, \"pid\": %d, \"thread\": %ld, "
      "\"start\": %.9f, \"end\": %.9f, \"cpu_start\": %.9f, \"cpu_end\": %.9f, "
      "\"own_cpu\": %.9f}\n",
      static_cast<double>(clock_ns(CLOCK_REALTIME)) * 1e-9, kind,
      static_cast<unsigned long long>(entries), static_cast<unsigned long long>(bytes), npu, device,
      stream, asynchronous ? "true" : "false", static_cast<int>(getpid()),
      static_cast<long>(syscall(SYS_gettid)),
      static_cast<double>(modelled ? slot.start : start_ns_) * 1e-9,
      static_cast<double>(modelled ? slot.end : end_ns) * 1e-9,
      static_cast<double>(process_cpu_ns_) * 1e-9, static_cast<double>(cpu) * 1e-9,
      static_cast<double>(own) * 1e-9);
  ssize_t written = write(trace_file(), line, static_cast<size_t>(length));
  (void)written;
}

}  // namespace rbln_sim
