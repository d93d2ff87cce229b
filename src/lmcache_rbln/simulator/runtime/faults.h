// SPDX-License-Identifier: Apache-2.0
//
// Faults: "KIND@N=ACTION", the Nth call of a kind, counted from when the fault was injected.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace rbln_sim {

enum class Call { kH2V, kV2H, kV2V, kMalloc, kOpen, kSync, kBorrow, kAny };
constexpr int kCalls = static_cast<int>(Call::kAny) + 1;
const char* name_of(Call call);

enum class Action { kNone, kFail, kLost, kShort, kWrong, kHang };

struct Fault {
  Call call = Call::kAny;
  uint64_t left = 1;  // fires when it gets to zero
  Action action = Action::kFail;
  double seconds = 0;
};

struct Verdict {
  Action action = Action::kNone;
  double seconds = 0;
  uint64_t era = 0;  // in which the call was made
};

bool parse_faults(const std::string& spec, std::vector<Fault>& faults, std::string& error);

// Counts the call and tells what is to happen to it.
Verdict consult(Call call);

// The same for calls that block anyway: a hang is spent before it returns.
Verdict consult_blocking(Call call);

// Gives the CPU away for the verdict's time, or until its era is over.
void hang(const Verdict& verdict);

bool inject(const std::string& spec, std::string& error);
// Also ends hangs, and starts a new era.
void clear_faults();
// Failures of asynchronous work are told only in the era in which the work was queued.
uint64_t fault_era();
uint64_t calls_of(Call call);
uint64_t faults_fired();
uint64_t faults_armed();
void reset_calls();

// Held around fork(), so that a child does not inherit a half-changed list.
void lock_faults();
void unlock_faults();

}  // namespace rbln_sim
