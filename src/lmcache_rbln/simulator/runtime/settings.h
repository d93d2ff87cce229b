// SPDX-License-Identifier: Apache-2.0
//
// What the environment asks of the simulated host: read once, when the library is loaded.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace rbln_sim {

constexpr int kMaxNpus = 64;

struct Settings {
  int npus = 1;
  uint64_t memory_bytes = uint64_t{16} << 30;
  double link_gbps = 0;  // each direction; 0: no modelled cost
  double d2d_gbps = 0;   // device to device; 0: no modelled cost
  double submit_us = 0;  // one submission
  double entry_us = 0;   // one entry of a bulk call
  bool copy = true;      // false: the modelled engines move no bytes
  uint64_t bulk_entries = 24;
  uint64_t bulk_bytes = uint64_t{12} << 20;
  bool exclusive = true;
  double delay_us = 0;  // asynchronous work starts up to this much late
  uint64_t seed = 0;
  std::string host;  // processes that name the same host share its NPUs
  std::string faults;
  std::string trace;
  std::string error;  // not empty: a setting could not be read, every call fails

  bool modelled() const { return link_gbps > 0 || d2d_gbps > 0 || submit_us > 0 || entry_us > 0; }
};

const Settings& settings();

// The physical NPUs this process may use, in the order it sees them. RBLN_DEVICES wins over
// RBLN_VISIBLE_DEVICES (vLLM-RBLN: "the runtime takes both names but prefers RBLN_DEVICES"). False
// and a message when the list names something that is not there.
bool visible_npus(std::vector<int>& npus, std::string& error);

// One line on stderr: what the simulated runtime has to say about a failing call.
void complain(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace rbln_sim
