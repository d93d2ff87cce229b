// SPDX-License-Identifier: Apache-2.0
//
// The part of the RBLN runtime's binary interface that torch-rbln links against.
//
// Sources: the C++ declarations that torch-rbln's public repository carries
// (third_party/rebel_compiler/include/rebel/runtime), and, for what was added since, the undefined
// symbols of the torch-rbln 0.12.0 wheel and the way its shared objects use them. Where a layout
// was read from the wheel rather than from a header, the declaration says so.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

typedef enum {
  RBLNRetCode_SUCCESS = 0,
  RBLNRetCode_FAILURE,
  RBLNRetCode_INVALID,
  // torch-rbln reads 3 as "the driver does not offer this query" (mem_get_info).
  RBLNRetCode_UNSUPPORTED,
} RBLNRetCode;

#pragma GCC visibility push(default)

// Read from the wheel: get_device_properties() takes a NUL-terminated name at offset 0, the
// memory of the NPU at 16, the memory of one chiplet at 24, the number of chiplets at 32.
struct RBLNDeviceProperties {
  char name[16];
  uint64_t total_memory;
  uint64_t memory_per_chiplet;
  uint32_t num_chiplet;
  uint32_t reserved;
};
static_assert(sizeof(RBLNDeviceProperties) == 40, "layout read from torch-rbln 0.12.0");

// Read from the wheel: 360 bytes, under the names that mem_get_info_per_chiplet() prints.
struct RBLNChipletMemory {
  uint64_t total;
  uint64_t used;
  uint64_t free;
  uint64_t largest_free;
  uint64_t largest_free_huge;
};
struct RBLNDeviceMemoryInfo {
  uint64_t total;
  uint64_t used;
  uint64_t free;
  uint64_t huge_granularity;
  uint32_t granularity;
  uint32_t num_chiplet;
  RBLNChipletMemory chiplets[8];
};
static_assert(sizeof(RBLNDeviceMemoryInfo) == 360, "layout read from torch-rbln 0.12.0");

namespace rbln {

enum class DataType {
  Undefined,
  Bool,
  UInt8,
  Int8,
  Int16,
  Int32,
  Int64,
  Float16,
  Float32,
  Float64,
  Float8_e4m3,
  Float8_e5m2,
  BFloat16,
  CustomFloat16,
  Complex32,
  Complex64,
  Complex128,
};

struct MemoryInfo {
  uint32_t torch_device_id;
  uint64_t key_vaddr;
  DataType user_dtype;
  std::vector<int64_t> user_shape;
  DataType physical_dtype;
  std::vector<int64_t> physical_shape;
};

// One copy of a bulk call: source, destination, bytes.
using CopyOps = std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>;

class MemoryStats {
 public:
  uint64_t GetAllocatedCurrent() const;
  uint64_t GetAllocatedPeak() const;
  uint64_t GetAllocatedTotalAllocated() const;
  uint64_t GetAllocatedTotalFreed() const;
  uint64_t GetReservedCurrent() const;
  uint64_t GetReservedPeak() const;
  uint64_t GetReservedTotalAllocated() const;
  uint64_t GetReservedTotalFreed() const;
  uint64_t GetActiveCurrent() const;
  uint64_t GetActivePeak() const;
  uint64_t GetCachedCurrent() const;
  uint64_t GetCachedPeak() const;
  uint64_t GetNumAllocRetries() const;
  uint64_t GetNumOoms() const;
  uint64_t GetNumDeviceAlloc() const;
  uint64_t GetNumDeviceFree() const;
  std::map<std::string, uint64_t> GetMemoryStats() const;

  // The order of the members is the vendor header's: the object is returned by value.
  uint64_t allocated_current = 0;
  uint64_t allocated_peak = 0;
  uint64_t allocated_total_allocated = 0;
  uint64_t allocated_total_freed = 0;
  uint64_t reserved_current = 0;
  uint64_t reserved_peak = 0;
  uint64_t reserved_total_allocated = 0;
  uint64_t reserved_total_freed = 0;
  uint64_t active_current = 0;
  uint64_t active_peak = 0;
  uint64_t cached_current = 0;
  uint64_t cached_peak = 0;
  uint64_t num_alloc_retries = 0;
  uint64_t num_ooms = 0;
  uint64_t num_device_alloc = 0;
  uint64_t num_device_free = 0;
};
static_assert(sizeof(MemoryStats) == 128, "returned by value across the library boundary");

RBLNRetCode rbln_malloc_eager(uint32_t torch_device, uint64_t size, uint64_t& vaddr);
RBLNRetCode rbln_malloc_lazy(uint32_t torch_device, uint64_t size, uint64_t& vaddr);
RBLNRetCode rbln_free(uint64_t vaddr);
RBLNRetCode rbln_mark_zeros(uint64_t vaddr);
RBLNRetCode rbln_set_memory_info(uint64_t vaddr, DataType user, DataType physical,
                                 const std::vector<int64_t>& shape);
RBLNRetCode rbln_get_memory_info(uint64_t vaddr, MemoryInfo& info);
RBLNRetCode rbln_get_torch_device_id_from_vaddr(uint64_t vaddr, uint32_t& torch_device);
RBLNRetCode rbln_set_raw_memory_alloc(uint64_t vaddr, uint64_t size);
RBLNRetCode rbln_set_device_alloc_layout_like(uint64_t vaddr, uint64_t like);
RBLNRetCode rbln_set_file_offloading_enabled(bool enabled);
RBLNRetCode rbln_release_offload_temp_storage(uint64_t* files);

RBLNRetCode rbln_memcpy_h2v(uint64_t host, uint64_t vaddr, uint64_t size);
RBLNRetCode rbln_memcpy_v2h(uint64_t vaddr, uint64_t host, uint64_t size);
RBLNRetCode rbln_memcpy_v2v(uint64_t source, uint64_t destination, uint64_t size);
RBLNRetCode rbln_memcpy_h2v_async(uint64_t host, uint64_t vaddr, uint64_t size, uint64_t* handle);
RBLNRetCode rbln_memcpy_v2h_async(uint64_t vaddr, uint64_t host, uint64_t size, uint64_t* handle);
RBLNRetCode rbln_memcpy_v2v_async(uint64_t source, uint64_t destination, uint64_t size,
                                  uint64_t* handle);
RBLNRetCode rbln_memcpy_h2v_multi(const CopyOps& ops);
RBLNRetCode rbln_memcpy_v2h_multi(const CopyOps& ops);
RBLNRetCode rbln_memcpy_v2v_multi(const CopyOps& ops);

RBLNRetCode rbln_stream_create(uint32_t torch_device, uint64_t* stream);
RBLNRetCode rbln_stream_query(uint64_t stream, bool* done);
RBLNRetCode rbln_stream_synchronize(uint64_t stream);
RBLNRetCode rbln_stream_wait_event(uint64_t stream, uint64_t event);
RBLNRetCode rbln_get_current_stream(uint32_t torch_device, uint64_t* stream);
RBLNRetCode rbln_set_current_stream(uint32_t torch_device, uint64_t stream);
RBLNRetCode rbln_event_create(uint32_t torch_device, uint64_t* event);
RBLNRetCode rbln_event_destroy(uint64_t event);
RBLNRetCode rbln_event_record(uint64_t event, uint64_t stream);
RBLNRetCode rbln_event_query(uint64_t event, bool* done);
RBLNRetCode rbln_event_synchronize(uint64_t event);
RBLNRetCode rbln_device_synchronize(uint32_t torch_device);

RBLNRetCode rbln_v_borrow_host_ptr(uint64_t vaddr, uint64_t size, uint64_t& host, uint64_t& borrow);
RBLNRetCode rbln_v_acquire_host_ptr_for_overwrite(uint64_t vaddr, uint64_t size, uint64_t& host,
                                                  uint64_t& borrow);
RBLNRetCode rbln_v_return_borrowed(uint64_t borrow, bool updated);

}  // namespace rbln

rbln::MemoryStats rbln_get_memory_stats(int torch_device);
// Outer index: NPU within the logical device; inner: chiplet (read from the wheel).
std::vector<std::vector<rbln::MemoryStats>> rbln_get_memory_stats_per_chiplet(int torch_device);

extern "C" {
RBLNRetCode rbln_register_device_id(int torch_device, int* npus, int count);
RBLNRetCode rbln_get_device_count(int* count);
RBLNRetCode rbln_get_device_properties(int npu, RBLNDeviceProperties* properties);
RBLNRetCode rbln_get_device_memory_info(int npu, RBLNDeviceMemoryInfo* info);
RBLNRetCode rbln_empty_cache(int torch_device);
RBLNRetCode rbln_reset_accumulated_memory_stats(int torch_device);
RBLNRetCode rbln_reset_peak_memory_stats(int torch_device);
}

#pragma GCC visibility pop
