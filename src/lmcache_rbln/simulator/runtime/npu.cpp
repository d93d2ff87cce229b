// SPDX-License-Identifier: Apache-2.0
#include "npu.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <new>

namespace rbln_sim {
namespace {

std::mutex opening;

// An abstract socket address: exists as long as a process holds it, and nowhere on disk.
sockaddr_un lock_address(int id, socklen_t& length) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const std::string name =
      "rbln-sim/" + std::to_string(geteuid()) + "/" + settings().host + "/" + std::to_string(id);
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // a zero first: abstract
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

// The process that holds the address; 0 when it cannot be told.
int holder(const sockaddr_un& address, socklen_t length) {
  const int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  ucred peer = {};
  socklen_t size = sizeof(peer);
  const bool told = probe >= 0 &&
                    connect(probe, reinterpret_cast<const sockaddr*>(&address), length) == 0 &&
                    getsockopt(probe, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0;
  if (probe >= 0) close(probe);
  return told ? peer.pid : 0;
}

}  // namespace

Host& host() {
  static Host* h = new Host;
  return *h;
}

Host::Host() {
  for (int id = 0; id < kMaxNpus; ++id) npus_[id].id = id;
}

bool Host::lock(Npu& npu, std::string& error) {
  socklen_t length;
  const sockaddr_un address = lock_address(npu.id, length);
  const int held = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (held >= 0 && bind(held, reinterpret_cast<const sockaddr*>(&address), length) == 0 &&
      listen(held, 1) == 0) {
    npu.lock = held;
    return true;
  }
  const int reason = errno;
  if (held >= 0) close(held);
  error = "NPU " + std::to_string(npu.id);
  if (reason != EADDRINUSE) {
    error += std::string(" cannot be taken: ") + std::strerror(reason);
    return false;
  }
  error += " is held by another process";
  if (const int pid = holder(address, length)) error += " (pid " + std::to_string(pid) + ")";
  return false;
}

void Host::unlock(Npu& npu) {
  if (npu.lock >= 0) close(npu.lock);
  npu.lock = -1;
}

int Host::physical(int visible, std::string& error) const {
  std::vector<int> npus;
  if (!visible_npus(npus, error)) return -1;
  if (visible < 0 || visible >= static_cast<int>(npus.size())) {
    error = "NPU " + std::to_string(visible) + " is out of range (this process sees " +
            std::to_string(npus.size()) + ")";
    return -1;
  }
  return npus[visible];
}

bool Host::open(uint32_t device, const int* visible, int count, std::string& error) {
  if (device >= kMaxNpus || count < 1 || !visible) {
    error = "logical device " + std::to_string(device) + " of " + std::to_string(count) + " NPUs";
    return false;
  }
  std::lock_guard<std::mutex> guard(opening);
  std::vector<int> ids;
  std::vector<Npu*> taken;
  for (int i = 0; i < count; ++i) {
    const int id = physical(visible[i], error);
    Npu* npu = id < 0 ? nullptr : &npus_[id];
    if (npu && npu->lost) {
      error = "NPU " + std::to_string(id) + " is lost";
      npu = nullptr;
    }
    if (npu && settings().exclusive && npu->lock < 0) {
      if (lock(*npu, error)) {
        taken.push_back(npu);
      } else {
        npu = nullptr;
      }
    }
    if (!npu) {
      for (Npu* other : taken) unlock(*other);
      return false;
    }
    ids.push_back(id);
  }
  for (int id : ids) npus_[id].open = true;
  const std::vector<int>* known = group(device);
  if (known && *known == ids) return true;
  // Another group replaces the first; that one may still be read and is left alone.
  groups_[device].store(new std::vector<int>(std::move(ids)), std::memory_order_release);
  return true;
}

const std::vector<int>* Host::group(uint32_t device) const {
  return device < kMaxNpus ? groups_[device].load(std::memory_order_acquire) : nullptr;
}

void Host::revive() {
  for (Npu& npu : npus_) npu.lost = false;
}

void Host::become_child(int parent) {
  for (Npu& npu : npus_) {
    if (npu.open) parent_ = parent;
    npu.open = false;
    npu.used_bytes = 0;
    unlock(npu);  // else the NPU would stay taken after the parent's death
    for (Engine& engine : npu.engines) new (&engine) Engine;  // mutexes may be held in the parent
  }
  for (auto& group : groups_) group = nullptr;
  new (&opening) std::mutex;  // another thread of the parent may have held it
}

}  // namespace rbln_sim
