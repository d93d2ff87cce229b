// SPDX-License-Identifier: Apache-2.0
//
// What the Python side of the simulator asks of the library, and what happens at fork().
#include <pthread.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

#include "faults.h"
#include "memory.h"
#include "npu.h"
#include "settings.h"
#include "streams.h"
#include "telemetry.h"

namespace rbln_sim {

void renew_borrows();

namespace {

int forking = 0;  // the process that forks

void before_fork() {
  forking = static_cast<int>(getpid());
  lock_faults();
}

void in_parent() { unlock_faults(); }

// The child has only the thread that forked: nothing may wait for a lock or a worker of another
// one. What was allocated stays the parent's, as its NPUs do.
void in_child() {
  unlock_faults();
  renew_memory();
  renew_streams();
  renew_borrows();
  host().become_child(forking);
}

// Reads the settings and says what is wrong with them when the library is loaded, not later.
__attribute__((constructor)) void load() {
  settings();
  host();
  counters();
  pthread_atfork(before_fork, in_parent, in_child);
}

int put(const std::string& text, char* out, uint64_t size) {
  if (size) {
    const uint64_t length = text.size() < size ? text.size() : size - 1;
    std::memcpy(out, text.data(), length);
    out[length] = 0;
  }
  return static_cast<int>(text.size());
}

}  // namespace
}  // namespace rbln_sim

#pragma GCC visibility push(default)
extern "C" {

// What torch_rbln.diagnose prints as the version of the runtime.
extern const char* const REBEL_COMPILER_VERSION;
const char* const REBEL_COMPILER_VERSION = "simulated (lmcache-rbln)";

// Tells the stand-in from the vendor's library.
int rbln_sim_version() { return 1; }

// Host address of `bytes` bytes of device memory, or null. Not a borrow: nothing is counted,
// nothing is waited for, and nothing keeps the memory; it is gone once the address is freed.
void* rbln_sim_host_address(uint64_t vaddr, uint64_t bytes) {
  rbln_sim::Pin pin = rbln_sim::memory().pin(vaddr, bytes);
  if (pin) return pin.host();
  rbln_sim::complain("rbln_sim_host_address: %s", rbln_sim::memory().explain(vaddr, bytes).c_str());
  return nullptr;
}

// The counters as one JSON object; returns its length, without the terminating zero.
int rbln_sim_counters(char* out, uint64_t size) {
  const rbln_sim::Counters& c = rbln_sim::counters();
  std::string json = "{";
  const auto number = [&](const char* name, uint64_t value) {
    json +=
        std::string(json.back() == '{' ? "" : ", ") + "\"" + name + "\": " + std::to_string(value);
  };
  const auto count = [&](const char* name, const rbln_sim::Count& value) {
    json += std::string(json.back() == '{' ? "" : ", ") + "\"" + name + "\": {";
    number("submissions", value.submissions);
    number("entries", value.entries);
    number("bytes", value.bytes);
    json += "}";
  };
  count("h2v", c.h2v);
  count("v2h", c.v2h);
  count("v2v", c.v2v);
  count("borrow", c.borrow);
  number("synchronize", c.synchronize);
  number("malloc", c.malloc);
  number("free", c.free);
  number("open", c.open);
  number("live_allocations", rbln_sim::memory().live_regions());
  number("faults_armed", rbln_sim::faults_armed());
  number("faults_fired", rbln_sim::faults_fired());
  json += ", \"calls\": {";
  for (int call = 0; call < rbln_sim::kCalls; ++call) {
    number(rbln_sim::name_of(static_cast<rbln_sim::Call>(call)),
           rbln_sim::calls_of(static_cast<rbln_sim::Call>(call)));
  }
  json += "}}";
  return rbln_sim::put(json, out, size);
}

void rbln_sim_reset_counters() {
  rbln_sim::reset_counters();
  rbln_sim::reset_calls();
}

// Returns 0, or the length of the message that `error` got.
int rbln_sim_inject(const char* spec, char* error, uint64_t size) {
  std::string why;
  if (rbln_sim::inject(spec, why)) return 0;
  return rbln_sim::put(why, error, size);
}

void rbln_sim_clear_faults() {
  rbln_sim::clear_faults();
  rbln_sim::forget_failures();
  rbln_sim::host().revive();
}

void rbln_sim_set_delay(double us, uint64_t seed) { rbln_sim::set_delay(us, seed); }

// What is wrong with the settings the library was loaded with; length 0 when nothing is.
int rbln_sim_settings_error(char* out, uint64_t size) {
  return rbln_sim::put(rbln_sim::settings().error, out, size);
}
}
#pragma GCC visibility pop
