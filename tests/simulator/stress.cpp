// SPDX-License-Identifier: Apache-2.0
//
// Eight threads on two simulated NPUs: allocations, copies of every sort, streams, events, frees
// with work still in flight, bad arguments. Built together with the runtime's sources under the
// address and thread sanitizers. Exits with 0 when every byte was right.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "abi.h"

namespace {

std::atomic<int> mistakes{0};

#define EXPECT(condition)                                         \
  do {                                                            \
    if (!(condition)) {                                           \
      std::printf("line %d: not so: %s\n", __LINE__, #condition); \
      ++mistakes;                                                 \
    }                                                             \
  } while (0)

uint64_t at(const void* host) { return reinterpret_cast<uint64_t>(host); }

void fill(std::vector<uint8_t>& bytes, std::mt19937& random) {
  const uint32_t first = random();
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(first + i * 31);
}

void blocking(uint32_t device, std::mt19937& random) {
  const uint64_t size = 1 + random() % 100000;
  uint64_t first = 0;
  uint64_t second = 0;
  EXPECT(rbln::rbln_malloc_lazy(device, size, first) == RBLNRetCode_SUCCESS);
  EXPECT(rbln::rbln_malloc_eager(device, size, second) == RBLNRetCode_SUCCESS);
  std::vector<uint8_t> out(size);
  std::vector<uint8_t> in(size);
  fill(out, random);
  EXPECT(rbln::rbln_memcpy_h2v(at(out.data()), first, size) == RBLNRetCode_SUCCESS);
  EXPECT(rbln::rbln_memcpy_v2v(first, second, size) == RBLNRetCode_SUCCESS);
  EXPECT(rbln::rbln_memcpy_v2h(second, at(in.data()), size) == RBLNRetCode_SUCCESS);
  EXPECT(in == out);
  EXPECT(rbln::rbln_mark_zeros(first) == RBLNRetCode_SUCCESS);
  EXPECT(rbln::rbln_memcpy_v2h(first, at(in.data()), size) == RBLNRetCode_SUCCESS);
  EXPECT(in == std::vector<uint8_t>(size));
  EXPECT(rbln::rbln_memcpy_v2h(first, at(in.data()), size + 1) != RBLNRetCode_SUCCESS);
  EXPECT(rbln::rbln_free(first + 1) != RBLNRetCode_SUCCESS);
  EXPECT(rbln::rbln_free(first) == RBLNRetCode_SUCCESS);
  EXPECT(rbln::rbln_free(first) != RBLNRetCode_SUCCESS);
  EXPECT(rbln::rbln_memcpy_v2h(first, at(in.data()), 1) != RBLNRetCode_SUCCESS);
  EXPECT(rbln::rbln_free(second) == RBLNRetCode_SUCCESS);
}

void bulk(uint32_t device, std::mt19937& random) {
  const size_t entries = 1 + random() % 24;
  const uint64_t size = 1 + random() % 5000;
  uint64_t base = 0;
  EXPECT(rbln::rbln_malloc_lazy(device, entries * size, base) == RBLNRetCode_SUCCESS);
  std::vector<uint8_t> out(entries * size);
  std::vector<uint8_t> in(entries * size);
  fill(out, random);
  rbln::CopyOps into;
  rbln::CopyOps back;
  for (size_t i = entries; i-- > 0;) {
    into.emplace_back(at(out.data()) + i * size, base + i * size, size);
    back.emplace_back(base + i * size, at(in.data()) + i * size, size);
  }
  EXPECT(rbln::rbln_memcpy_h2v_multi(into) == RBLNRetCode_SUCCESS);
  EXPECT(rbln::rbln_memcpy_v2h_multi(back) == RBLNRetCode_SUCCESS);
  EXPECT(in == out);
  into.push_back(into.front());
  EXPECT(rbln::rbln_memcpy_h2v_multi(into) != RBLNRetCode_SUCCESS);
  EXPECT(rbln::rbln_free(base) == RBLNRetCode_SUCCESS);
}

// host -> first on one stream, first -> second -> host on another, ordered by an event only.
void streamed(uint32_t device, const uint64_t streams[2], std::mt19937& random) {
  const uint64_t size = 1 + random() % 100000;
  uint64_t first = 0;
  uint64_t second = 0;
  uint64_t event = 0;
  EXPECT(rbln::rbln_malloc_lazy(device, size, first) == RBLNRetCode_SUCCESS);
  EXPECT(rbln::rbln_malloc_lazy(device, size, second) == RBLNRetCode_SUCCESS);
  EXPECT(rbln::rbln_event_create(device, &event) == RBLNRetCode_SUCCESS);
  std::vector<uint8_t> out(size);
  std::vector<uint8_t> in(size);
  fill(out, random);
  EXPECT(rbln::rbln_set_current_stream(device, streams[0]) == RBLNRetCode_SUCCESS);
  EXPECT(rbln::rbln_memcpy_h2v_async(at(out.data()), first, size, nullptr) == RBLNRetCode_SUCCESS);
  EXPECT(rbln::rbln_event_record(event, streams[0]) == RBLNRetCode_SUCCESS);
  EXPECT(rbln::rbln_stream_wait_event(streams[1], event) == RBLNRetCode_SUCCESS);
  EXPECT(rbln::rbln_set_current_stream(device, streams[1]) == RBLNRetCode_SUCCESS);
  EXPECT(rbln::rbln_memcpy_v2v_async(first, second, size, nullptr) == RBLNRetCode_SUCCESS);
  EXPECT(rbln::rbln_memcpy_v2h_async(second, at(in.data()), size, nullptr) == RBLNRetCode_SUCCESS);
  // Freed while in use: the memory stays until the copies are done.
  EXPECT(rbln::rbln_free(first) == RBLNRetCode_SUCCESS);
  EXPECT(rbln::rbln_free(second) == RBLNRetCode_SUCCESS);
  EXPECT(rbln::rbln_event_record(event, streams[1]) == RBLNRetCode_SUCCESS);
  switch (random() % 3) {
    case 0:
      EXPECT(rbln::rbln_event_synchronize(event) == RBLNRetCode_SUCCESS);
      break;
    case 1:
      EXPECT(rbln::rbln_stream_synchronize(streams[1]) == RBLNRetCode_SUCCESS);
      break;
    default:
      EXPECT(rbln::rbln_device_synchronize(device) == RBLNRetCode_SUCCESS);
  }
  bool done = false;
  EXPECT(rbln::rbln_event_query(event, &done) == RBLNRetCode_SUCCESS);
  EXPECT(done);
  EXPECT(in == out);
  EXPECT(rbln::rbln_event_destroy(event) == RBLNRetCode_SUCCESS);
  EXPECT(rbln::rbln_event_destroy(event) != RBLNRetCode_SUCCESS);
  EXPECT(rbln::rbln_set_current_stream(device, uint64_t{device} << 32) == RBLNRetCode_SUCCESS);
}

void borrowed(uint32_t device, std::mt19937& random) {
  const uint64_t size = 1 + random() % 5000;
  uint64_t base = 0;
  uint64_t host = 0;
  uint64_t borrow = 0;
  EXPECT(rbln::rbln_malloc_lazy(device, size, base) == RBLNRetCode_SUCCESS);
  EXPECT(rbln::rbln_v_borrow_host_ptr(base, size, host, borrow) == RBLNRetCode_SUCCESS);
  std::memset(reinterpret_cast<void*>(host), 7, size);
  EXPECT(rbln::rbln_free(base) == RBLNRetCode_SUCCESS);
  EXPECT(*reinterpret_cast<uint8_t*>(host) == 7);
  EXPECT(rbln::rbln_v_return_borrowed(borrow, true) == RBLNRetCode_SUCCESS);
  EXPECT(rbln::rbln_v_return_borrowed(borrow, true) != RBLNRetCode_SUCCESS);
}

void work(uint32_t thread, int rounds) {
  std::mt19937 random(thread);
  const uint32_t device = thread % 2;
  uint64_t streams[2];
  for (uint64_t& stream : streams) {
    EXPECT(rbln::rbln_stream_create(device, &stream) == RBLNRetCode_SUCCESS);
  }
  for (int round = 0; round < rounds; ++round) {
    switch (random() % 4) {
      case 0:
        blocking(device, random);
        break;
      case 1:
        bulk(device, random);
        break;
      case 2:
        borrowed(device, random);
        break;
      default:
        streamed(device, streams, random);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 200;
  for (int device = 0; device < 2; ++device) {
    int npu = device;
    EXPECT(rbln_register_device_id(device, &npu, 1) == RBLNRetCode_SUCCESS);
  }
  std::vector<std::thread> threads;
  for (uint32_t thread = 0; thread < 8; ++thread) threads.emplace_back(work, thread, rounds);
  for (std::thread& thread : threads) thread.join();
  for (int device = 0; device < 2; ++device) {
    EXPECT(rbln::rbln_device_synchronize(static_cast<uint32_t>(device)) == RBLNRetCode_SUCCESS);
    EXPECT(rbln_get_memory_stats(device).allocated_current == 0);
    RBLNDeviceMemoryInfo info;
    EXPECT(rbln_get_device_memory_info(device, &info) == RBLNRetCode_SUCCESS);
    EXPECT(info.used == 0);
  }
  std::printf("%d mistakes\n", mistakes.load());
  return mistakes ? 1 : 0;
}
