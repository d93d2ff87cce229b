// SPDX-License-Identifier: Apache-2.0
#include "streams.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <memory>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "clock.h"
#include "npu.h"
#include "settings.h"

namespace rbln_sim {
namespace {

struct Registry {
  std::mutex mutex;
  std::vector<Stream*> streams[kMaxNpus];  // those made, numbered from 1
  std::atomic<Stream*> defaults[kMaxNpus] = {};
  std::unordered_map<uint64_t, Mark> events;
  uint32_t last_event = 0;
};

// Never destroyed: workers outlive static destruction.
std::atomic<Registry*> instance{new Registry};
Registry& registry() { return *instance.load(std::memory_order_acquire); }

thread_local Stream* selected[kMaxNpus] = {};

// splitmix64: one well-mixed number out of a seed, a stream and a position, so that the same run
// meets the same delays however its threads are scheduled.
uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

struct Delay {
  std::atomic<double> us{settings().delay_us};
  std::atomic<uint64_t> seed{settings().seed};
};

Delay& delay() {
  static Delay* d = new Delay;
  return *d;
}

uint64_t delay_ns(uint64_t handle, uint64_t position) {
  const uint64_t drawn = mix(mix(mix(delay().seed) ^ handle) ^ position);
  return static_cast<uint64_t>(delay().us * 1e3 * (static_cast<double>(drawn >> 11) * 0x1p-53));
}

Stream& default_stream(uint32_t device) {
  Registry& r = registry();
  Stream* stream = r.defaults[device].load(std::memory_order_acquire);
  if (stream) return *stream;
  std::lock_guard<std::mutex> guard(r.mutex);
  stream = r.defaults[device].load(std::memory_order_relaxed);
  if (!stream) {
    stream = new Stream(uint64_t{device} << 32);
    r.defaults[device].store(stream, std::memory_order_release);
  }
  return *stream;
}

}  // namespace

uint64_t Stream::submit(Work work, bool delayed) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (!worker_) {
    // Signals of the process are for its own threads.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread(&Stream::run, this).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    worker_ = true;
  }
  queue_.push_back({std::move(work), delayed, now_ns()});
  const uint64_t position = submitted_.load(std::memory_order_relaxed) + 1;
  submitted_.store(position, std::memory_order_release);
  more_.notify_one();
  return position;
}

void Stream::run() {
  pthread_setname_np(pthread_self(), "rbln-sim-stream");
  uint64_t clock = 0;  // modelled end of the work before
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    more_.wait(lock, [this] { return !queue_.empty(); });
    Item item = std::move(queue_.front());
    queue_.pop_front();
    const uint64_t position = completed_.load(std::memory_order_relaxed) + 1;
    lock.unlock();
    uint64_t ready = std::max(item.submitted_ns, clock);
    if (item.delayed && delay().us > 0) {
      ready += delay_ns(handle_, position);
      if (now_ns() < ready) sleep_until(ready);
    }
    clock = std::max(clock, item.work(ready));
    item.work = nullptr;  // lets go of what it kept before anybody is told
    lock.lock();
    completed_.store(position, std::memory_order_release);
    done_.notify_all();
  }
}

void Stream::wait(uint64_t position) {
  if (reached(position)) return;
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [&] { return reached(position); });
}

void Stream::fail(std::string reason) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (failure_.empty()) failure_ = std::move(reason);
}

std::string Stream::take_failure() {
  std::lock_guard<std::mutex> guard(mutex_);
  return std::exchange(failure_, {});
}

Stream* find_stream(uint64_t handle) {
  const uint32_t device = device_of(handle);
  const uint32_t number = number_of(handle);
  if (!host().group(device)) return nullptr;
  if (!number) return &default_stream(device);
  Registry& r = registry();
  std::lock_guard<std::mutex> guard(r.mutex);
  return number <= r.streams[device].size() ? r.streams[device][number - 1] : nullptr;
}

Stream* create_stream(uint32_t device) {
  if (!host().group(device)) return nullptr;
  Registry& r = registry();
  std::lock_guard<std::mutex> guard(r.mutex);
  auto& streams = r.streams[device];
  streams.push_back(new Stream((uint64_t{device} << 32) | (streams.size() + 1)));
  return streams.back();
}

Stream& current_stream(uint32_t device) {
  return selected[device] ? *selected[device] : default_stream(device);
}

bool select_stream(uint64_t handle) {
  Stream* stream = find_stream(handle);
  if (!stream) return false;
  selected[device_of(handle)] = stream;
  return true;
}

std::string drain_device(uint32_t device) {
  Registry& r = registry();
  std::vector<Stream*> streams;
  {
    std::lock_guard<std::mutex> guard(r.mutex);
    streams = r.streams[device];
  }
  if (Stream* stream = r.defaults[device].load(std::memory_order_acquire)) {
    streams.push_back(stream);
  }
  // What is submitted while this waits is not waited for.
  std::vector<uint64_t> positions;
  for (Stream* stream : streams) positions.push_back(stream->submitted());
  std::string failure;
  for (size_t i = 0; i < streams.size(); ++i) {
    streams[i]->wait(positions[i]);
    std::string reason = streams[i]->take_failure();
    if (failure.empty()) failure = std::move(reason);
  }
  return failure;
}

void forget_failures() {
  Registry& r = registry();
  std::lock_guard<std::mutex> guard(r.mutex);
  for (auto& streams : r.streams) {
    for (Stream* stream : streams) stream->take_failure();
  }
  for (auto& stream : r.defaults) {
    if (stream.load()) stream.load()->take_failure();
  }
}

uint64_t create_event(uint32_t device) {
  Registry& r = registry();
  std::lock_guard<std::mutex> guard(r.mutex);
  const uint64_t event = (uint64_t{device} << 32) | ++r.last_event;
  r.events.emplace(event, Mark{});
  return event;
}

bool destroy_event(uint64_t event) {
  Registry& r = registry();
  std::lock_guard<std::mutex> guard(r.mutex);
  return r.events.erase(event) == 1;
}

bool record_event(uint64_t event, Stream& stream) {
  Registry& r = registry();
  std::lock_guard<std::mutex> guard(r.mutex);
  auto found = r.events.find(event);
  if (found == r.events.end()) return false;
  found->second = {&stream, stream.submitted()};
  return true;
}

bool find_event(uint64_t event, Mark& mark) {
  Registry& r = registry();
  std::lock_guard<std::mutex> guard(r.mutex);
  auto found = r.events.find(event);
  if (found == r.events.end()) return false;
  mark = found->second;
  return true;
}

void set_delay(double us, uint64_t seed) {
  delay().seed = seed;
  delay().us = us;
}

void renew_streams() {
  instance = new Registry;
  std::fill(std::begin(selected), std::end(selected), nullptr);
}

}  // namespace rbln_sim
