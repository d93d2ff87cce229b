// SPDX-License-Identifier: Apache-2.0
//
// What torch-rbln links against and the simulated host does not have: collectives (rccl), compiled
// graphs, the kineto profiler. Each refuses when used; the profiler's counters read as zero.
//
// Only the symbols matter: the arguments were read from the mangled names, and are not looked at.
#include <cstdint>
#include <vector>

#include "abi.h"
#include "settings.h"

#pragma GCC visibility push(default)

struct rccl_extra_args;
struct rccl_unique_id;

namespace rbln {

class Rccl {
 public:
  enum class RcclDataType : int {};
  enum class RcclReduceOp : int {};

  Rccl();
  ~Rccl();
  int Init(int, int, int, const std::vector<int>&, int);
  int InitWithUniqueId(int, int, int, const std::vector<int>&, int, const rccl_unique_id*);
  int GetUniqueIdForBroadcast(rccl_unique_id*);
  int PrepareContextAndExportMem(int);
  int CheckChunksDeviceAddrsContiguous(const std::vector<void*>&, int, RcclDataType, const char*);
  int Send(void*, int, RcclDataType, int, rccl_extra_args*);
  int Recv(void*, int, RcclDataType, int, rccl_extra_args*);
  int Broadcast(void*, void*, int, RcclDataType, int, rccl_extra_args*);
  int Scatter(const std::vector<void*>&, void*, int, RcclDataType, int, rccl_extra_args*);
  int AllGather(void*, const std::vector<void*>&, int, RcclDataType, int, rccl_extra_args*);
  int AllReduce(void*, void*, int, RcclDataType, RcclReduceOp, int, rccl_extra_args*);
  int ReduceScatter(const std::vector<void*>&, void*, int, RcclDataType, RcclReduceOp, int,
                    rccl_extra_args*);
};

namespace {
int refuse(const char* what) {
  rbln_sim::complain("%s: not part of the simulated runtime", what);
  return 1;
}
}  // namespace

Rccl::Rccl() = default;
Rccl::~Rccl() = default;
// A group may be formed: torch-rbln forms one for each rank of vLLM-RBLN, and sends what is in host
// memory through gloo. Only what would move device memory refuses.
int Rccl::Init(int, int, int, const std::vector<int>&, int) { return 0; }
int Rccl::InitWithUniqueId(int, int, int, const std::vector<int>&, int, const rccl_unique_id*) {
  return 0;
}
int Rccl::GetUniqueIdForBroadcast(rccl_unique_id*) { return 0; }
int Rccl::PrepareContextAndExportMem(int) { return 0; }
int Rccl::CheckChunksDeviceAddrsContiguous(const std::vector<void*>&, int, RcclDataType,
                                           const char*) {
  return refuse("Rccl::CheckChunksDeviceAddrsContiguous");
}
int Rccl::Send(void*, int, RcclDataType, int, rccl_extra_args*) { return refuse("Rccl::Send"); }
int Rccl::Recv(void*, int, RcclDataType, int, rccl_extra_args*) { return refuse("Rccl::Recv"); }
int Rccl::Broadcast(void*, void*, int, RcclDataType, int, rccl_extra_args*) {
  return refuse("Rccl::Broadcast");
}
int Rccl::Scatter(const std::vector<void*>&, void*, int, RcclDataType, int, rccl_extra_args*) {
  return refuse("Rccl::Scatter");
}
int Rccl::AllGather(void*, const std::vector<void*>&, int, RcclDataType, int, rccl_extra_args*) {
  return refuse("Rccl::AllGather");
}
int Rccl::AllReduce(void*, void*, int, RcclDataType, RcclReduceOp, int, rccl_extra_args*) {
  return refuse("Rccl::AllReduce");
}
int Rccl::ReduceScatter(const std::vector<void*>&, void*, int, RcclDataType, RcclReduceOp, int,
                        rccl_extra_args*) {
  return refuse("Rccl::ReduceScatter");
}

}  // namespace rbln

extern "C" {

// The handshake torch_rbln/_internal/abi_check.py makes: min_supported <= 6 <= current, 6 being the
// number torch-rbln 0.12.0 was built against. The stand-in implements what that release needs and
// nothing later, so it says exactly that: a newer torch-rbln is refused at import, by name.
uint32_t rbln_abi_min_supported() { return 6; }
uint32_t rbln_abi_current() { return 6; }

int rbln_runtime_available() { return 1; }

// Compiled graphs.
int rbln_rt_prepare_inputs() { return rbln::refuse("rbln_rt_prepare_inputs"); }
int rbln_rt_prepare_outputs() { return rbln::refuse("rbln_rt_prepare_outputs"); }
int rbln_rt_run() { return rbln::refuse("rbln_rt_run"); }

// torch.profiler: no session can be started.
int rbln_kineto_begin_session() { return 1; }
int rbln_kineto_end_session_and_export(void*, void*, int* events) {
  *events = 0;
  return 1;
}
int rbln_kineto_is_active(int* active) {
  *active = 0;
  return 0;
}

// Residency counters of torch_rbln.profiler: device memory never moves to the host by itself here.
static void two_zeros(uint64_t* first, uint64_t* second) {
  if (first) *first = 0;
  if (second) *second = 0;
}
void rbln_prof_get_host_sync_d2h(uint64_t* count, uint64_t* bytes) { two_zeros(count, bytes); }
void rbln_prof_get_host_sync_h2d(uint64_t* count, uint64_t* bytes) { two_zeros(count, bytes); }
void rbln_prof_get_memory(uint64_t* first, uint64_t* second) { two_zeros(first, second); }
void rbln_prof_get_v2v_hidden_d2h(uint64_t*, uint64_t*, uint32_t) {}
void rbln_prof_get_v2v_reject(uint64_t*, uint64_t*, uint32_t) {}
void rbln_prof_reset_host_sync_d2h() {}
void rbln_prof_reset_host_sync_h2d() {}
void rbln_prof_reset_v2v_hidden_d2h() {}
void rbln_prof_reset_v2v_reject() {}
uint32_t rbln_prof_v2v_hidden_num_reasons() { return 0; }
uint32_t rbln_prof_v2v_reject_num_reasons() { return 0; }
}

#pragma GCC visibility pop
