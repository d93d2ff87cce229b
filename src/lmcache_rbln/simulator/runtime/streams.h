// SPDX-License-Identifier: Apache-2.0
//
// Streams are in-order queues, each with a worker thread of its own, started when the first
// asynchronous work comes. Events are positions in a stream; both mean what CUDA's mean.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>

#include "abi.h"

namespace rbln_sim {

// A handle of a stream or an event is the logical device in its upper 32 bits and a number within
// the device in its lower ones; stream 0 of a device is its default stream. torch-rbln 0.12.0 puts
// stream handles together and takes event handles apart this way (read from the wheel).
inline uint32_t device_of(uint64_t handle) { return static_cast<uint32_t>(handle >> 32); }
inline uint32_t number_of(uint64_t handle) { return static_cast<uint32_t>(handle); }

class Stream {
 public:
  explicit Stream(uint64_t handle) : handle_(handle) {}

  uint64_t handle() const { return handle_; }
  uint32_t device() const { return device_of(handle_); }
  uint32_t number() const { return number_of(handle_); }

  // Runs `work` on the worker once everything before it has completed. The argument is the time
  // (ns, CLOCK_MONOTONIC) at which the work is ready in the model; the result is the modelled end,
  // or 0 where the work has none.
  using Work = std::function<uint64_t(uint64_t ready_ns)>;
  uint64_t submit(Work work, bool delayed);

  uint64_t submitted() const { return submitted_.load(std::memory_order_acquire); }
  bool reached(uint64_t position) const {
    return completed_.load(std::memory_order_acquire) >= position;
  }
  bool idle() const { return reached(submitted()); }
  void wait(uint64_t position);

  // Why asynchronous work failed, kept until a wait reports it: the first reason, for one report.
  void fail(std::string reason);
  // Empty when nothing has failed.
  std::string take_failure();

 private:
  struct Item {
    Work work;
    bool delayed;
    uint64_t submitted_ns;
  };

  void run();

  const uint64_t handle_;
  std::mutex mutex_;
  std::condition_variable more_;
  std::condition_variable done_;
  std::deque<Item> queue_;
  bool worker_ = false;
  std::atomic<uint64_t> submitted_{0};
  std::atomic<uint64_t> completed_{0};
  std::string failure_;
};

Stream* find_stream(uint64_t handle);  // null when there is none
Stream* create_stream(uint32_t device);
// What the calling thread selected with rbln_set_current_stream().
Stream& current_stream(uint32_t device);
bool select_stream(uint64_t handle);
// Waits for every stream of the device; returns why one of them had failed, else nothing.
std::string drain_device(uint32_t device);

// Failures that nobody was told yet are dropped.
void forget_failures();

uint64_t create_event(uint32_t device);
bool destroy_event(uint64_t event);
bool record_event(uint64_t event, Stream& stream);
// The position an event stands for; stream is null when it was never recorded.
struct Mark {
  Stream* stream = nullptr;
  uint64_t position = 0;
};
bool find_event(uint64_t event, Mark& mark);

// Asynchronous work starts up to `us` late, by a random time drawn from `seed`. The settings'
// values hold until then.
void set_delay(double us, uint64_t seed);

// In a forked child: the parent's streams have no workers here.
void renew_streams();

}  // namespace rbln_sim
