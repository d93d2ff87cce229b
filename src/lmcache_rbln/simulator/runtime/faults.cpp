// SPDX-License-Identifier: Apache-2.0
#include "faults.h"

#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <mutex>

#include "settings.h"

namespace rbln_sim {
namespace {

constexpr const char* kNames[kCalls] = {"h2v",  "v2h",  "v2v",    "malloc",
                                        "open", "sync", "borrow", "any"};

struct Armed {
  std::mutex mutex;
  std::vector<Fault> faults;
  std::atomic<bool> any{false};  // lets calls skip the mutex when nothing is armed
  std::atomic<uint64_t> calls[kCalls] = {};
  std::atomic<uint64_t> fired{0};
  std::atomic<uint64_t> era{0};
  std::condition_variable cleared;
};

Armed& armed() {
  static Armed* a = [] {
    auto* fresh = new Armed;
    std::string why;
    parse_faults(settings().faults, fresh->faults, why);  // settings() reports what is wrong
    fresh->any = !fresh->faults.empty();
    return fresh;
  }();
  return *a;
}

bool parse_one(const std::string& item, Fault& fault, std::string& error) {
  const char* const form =
      "KIND@N=ACTION;... with KIND h2v v2h v2v malloc open sync borrow any, N from 1, "
      "ACTION fail lost short wrong hang=SECONDS; short and wrong only for h2v v2h v2v any";
  error = form;
  const size_t at = item.find('@');
  const size_t equals = item.find('=');
  if (at == std::string::npos || equals == std::string::npos || equals < at) return false;
  const std::string kind = item.substr(0, at);
  const std::string count = item.substr(at + 1, equals - at - 1);
  const std::string action = item.substr(equals + 1);

  int call = 0;
  while (call < kCalls && kind != kNames[call]) ++call;
  if (call == kCalls) return false;
  fault.call = static_cast<Call>(call);

  if (count.empty() || count.size() > 18 ||
      count.find_first_not_of("0123456789") != std::string::npos) {
    return false;
  }
  fault.left = std::strtoull(count.c_str(), nullptr, 10);
  if (!fault.left) return false;

  if (action == "fail") {
    fault.action = Action::kFail;
  } else if (action == "lost") {
    fault.action = Action::kLost;
  } else if (action == "short" || action == "wrong") {
    fault.action = action == "short" ? Action::kShort : Action::kWrong;
    const bool copies = fault.call == Call::kH2V || fault.call == Call::kV2H ||
                        fault.call == Call::kV2V || fault.call == Call::kAny;
    if (!copies) {
      error = "'short' and 'wrong' only for copies (h2v v2h v2v any)";
      return false;
    }
  } else if (action.rfind("hang=", 0) == 0) {
    fault.action = Action::kHang;
    char* end = nullptr;
    const char* seconds = action.c_str() + 5;
    fault.seconds = std::strtod(seconds, &end);
    if (end == seconds || *end || !std::isfinite(fault.seconds) || fault.seconds < 0 ||
        fault.seconds > 86400) {
      error = "hang=SECONDS with SECONDS from 0 to 86400";
      return false;
    }
  } else {
    return false;
  }
  return true;
}

}  // namespace

const char* name_of(Call call) { return kNames[static_cast<int>(call)]; }

bool parse_faults(const std::string& spec, std::vector<Fault>& faults, std::string& error) {
  size_t from = 0;
  while (from <= spec.size()) {
    size_t to = spec.find(';', from);
    if (to == std::string::npos) to = spec.size();
    const std::string item = spec.substr(from, to - from);
    if (!item.empty()) {
      Fault fault;
      if (!parse_one(item, fault, error)) return false;
      faults.push_back(fault);
    }
    from = to + 1;
  }
  return true;
}

Verdict consult(Call call) {
  Armed& a = armed();
  a.calls[static_cast<int>(call)].fetch_add(1, std::memory_order_relaxed);
  a.calls[static_cast<int>(Call::kAny)].fetch_add(1, std::memory_order_relaxed);
  Verdict verdict;
  verdict.era = a.era;
  if (!a.any.load(std::memory_order_acquire)) return verdict;
  {
    std::lock_guard<std::mutex> guard(a.mutex);
    for (size_t i = 0; i < a.faults.size();) {
      Fault& fault = a.faults[i];
      if ((fault.call != call && fault.call != Call::kAny) || --fault.left) {
        ++i;
        continue;
      }
      // Two faults may meet in one call: the first one listed wins, both are used up.
      if (verdict.action == Action::kNone) {
        verdict.action = fault.action;
        verdict.seconds = fault.seconds;
      }
      a.faults.erase(a.faults.begin() + static_cast<long>(i));
    }
    a.any = !a.faults.empty();
  }
  if (verdict.action == Action::kNone) return verdict;
  a.fired.fetch_add(1, std::memory_order_relaxed);
  // 'any' may hit a call that copies nothing.
  const bool copies = call == Call::kH2V || call == Call::kV2H || call == Call::kV2V;
  const bool of_copies = verdict.action == Action::kShort || verdict.action == Action::kWrong;
  if (of_copies && !copies) verdict.action = Action::kFail;
  return verdict;
}

Verdict consult_blocking(Call call) {
  Verdict verdict = consult(call);
  if (verdict.action == Action::kHang) {
    hang(verdict);
    verdict.action = Action::kNone;
  }
  return verdict;
}

void hang(const Verdict& verdict) {
  Armed& a = armed();
  std::unique_lock<std::mutex> lock(a.mutex);
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::duration<double>(verdict.seconds);
  a.cleared.wait_until(lock, deadline, [&] { return a.era != verdict.era; });
}

bool inject(const std::string& spec, std::string& error) {
  std::vector<Fault> parsed;
  if (!parse_faults(spec, parsed, error)) return false;
  Armed& a = armed();
  std::lock_guard<std::mutex> guard(a.mutex);
  a.faults.insert(a.faults.end(), parsed.begin(), parsed.end());
  a.any = !a.faults.empty();
  return true;
}

void clear_faults() {
  Armed& a = armed();
  std::lock_guard<std::mutex> guard(a.mutex);
  a.faults.clear();
  a.any = false;
  ++a.era;
  a.cleared.notify_all();
}

uint64_t fault_era() { return armed().era.load(); }

uint64_t calls_of(Call call) { return armed().calls[static_cast<int>(call)].load(); }
uint64_t faults_fired() { return armed().fired.load(); }

uint64_t faults_armed() {
  Armed& a = armed();
  std::lock_guard<std::mutex> guard(a.mutex);
  return a.faults.size();
}

void reset_calls() {
  for (auto& calls : armed().calls) calls = 0;
  armed().fired = 0;
}

void lock_faults() { armed().mutex.lock(); }
void unlock_faults() { armed().mutex.unlock(); }

}  // namespace rbln_sim
