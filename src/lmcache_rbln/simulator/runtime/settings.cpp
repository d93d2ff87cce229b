// SPDX-License-Identifier: Apache-2.0
#include "settings.h"

#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "faults.h"

namespace rbln_sim {
namespace {

// getenv() of a name that is set to nothing counts as not set.
const char* text(const char* name) {
  const char* value = std::getenv(name);
  return value && *value ? value : nullptr;
}

class Reader {
 public:
  explicit Reader(std::string& error) : error_(error) {}

  void number(const char* name, double& out, double low, double high) {
    const char* value = text(name);
    if (!value) return;
    char* end = nullptr;
    errno = 0;
    double parsed = std::strtod(value, &end);
    const bool starts = (*value >= '0' && *value <= '9') || *value == '-' || *value == '.';
    if (!starts || *end || errno || !std::isfinite(parsed) || parsed < low || parsed > high) {
      char range[64];
      std::snprintf(range, sizeof(range), "a number from %g to %g", low, high);
      reject(name, value, range);
      return;
    }
    out = parsed;
  }

  void integer(const char* name, uint64_t& out, uint64_t low, uint64_t high) {
    const char* value = text(name);
    if (!value) return;
    char* end = nullptr;
    errno = 0;
    unsigned long long parsed = std::strtoull(value, &end, 10);
    if (*end || errno || *value < '0' || *value > '9' || parsed < low || parsed > high) {
      char range[80];
      std::snprintf(range, sizeof(range), "an integer from %llu to %llu",
                    static_cast<unsigned long long>(low), static_cast<unsigned long long>(high));
      reject(name, value, range);
      return;
    }
    out = parsed;
  }

  void flag(const char* name, bool& out) {
    const char* value = text(name);
    if (!value) return;
    if (std::strcmp(value, "0") && std::strcmp(value, "1")) {
      reject(name, value, "0 or 1");
      return;
    }
    out = *value == '1';
  }

  void bulk_limit(uint64_t& entries, uint64_t& bytes) {
    const char* value = text("RBLN_SIM_BULK_LIMIT");
    if (!value) return;
    unsigned parsed_entries = 0;
    unsigned mebibytes = 0;
    int used = 0;
    if (std::sscanf(value, "%u:%u%n", &parsed_entries, &mebibytes, &used) != 2 || value[used] ||
        *value < '0' || *value > '9' || !parsed_entries || !mebibytes ||
        parsed_entries > (1u << 20) || mebibytes > (1u << 20)) {
      reject("RBLN_SIM_BULK_LIMIT", value, "ENTRIES:MIB, both at least 1, such as 24:12");
      return;
    }
    entries = parsed_entries;
    bytes = uint64_t{mebibytes} << 20;
  }

  void reject(const char* name, const char* value, const char* expected) {
    if (!error_.empty()) return;
    error_ = std::string(name) + "=" + value + " is not valid: expected " + expected;
  }

 private:
  std::string& error_;
};

Settings read() {
  Settings s;
  Reader reader(s.error);
  uint64_t npus = 1;
  reader.integer("RBLN_SIM_NPUS", npus, 0, kMaxNpus);
  s.npus = static_cast<int>(npus);
  double gib = 16;
  // The address window of an NPU holds far more than 4 TiB.
  reader.number("RBLN_SIM_MEMORY_GB", gib, 1.0 / 1024, 4096);
  s.memory_bytes = static_cast<uint64_t>(gib * 1024) << 20;
  reader.number("RBLN_SIM_LINK_GBPS", s.link_gbps, 0, 1e6);
  reader.number("RBLN_SIM_D2D_GBPS", s.d2d_gbps, 0, 1e6);
  reader.number("RBLN_SIM_SUBMIT_US", s.submit_us, 0, 1e7);
  reader.number("RBLN_SIM_ENTRY_US", s.entry_us, 0, 1e7);
  reader.flag("RBLN_SIM_COPY", s.copy);
  reader.bulk_limit(s.bulk_entries, s.bulk_bytes);
  reader.flag("RBLN_SIM_EXCLUSIVE", s.exclusive);
  reader.number("RBLN_SIM_DELAY_US", s.delay_us, 0, 1e7);
  reader.integer("RBLN_SIM_SEED", s.seed, 0, ~uint64_t{0});
  if (const char* host = text("RBLN_SIM_HOST")) {
    s.host = host;
    bool plain = s.host.size() <= 64;
    for (char c : s.host) {
      plain = plain && (std::isalnum(static_cast<unsigned char>(c)) || std::strchr("._-", c));
    }
    if (!plain) reader.reject("RBLN_SIM_HOST", host, "up to 64 letters, digits, '.', '_', '-'");
  } else {
    s.host = "default";
  }
  if (const char* trace = text("RBLN_SIM_TRACE")) s.trace = trace;
  if (const char* faults = text("RBLN_SIM_FAULTS")) {
    s.faults = faults;
    std::string why;
    std::vector<Fault> parsed;
    if (!parse_faults(s.faults, parsed, why)) {
      reader.reject("RBLN_SIM_FAULTS", faults, why.c_str());
    }
  }
  if (!s.error.empty()) complain("%s", s.error.c_str());
  return s;
}

}  // namespace

const Settings& settings() {
  // Never destroyed: threads of the runtime may still read it while the process exits.
  static const Settings* s = new Settings(read());
  return *s;
}

bool visible_npus(std::vector<int>& npus, std::string& error) {
  npus.clear();
  const char* name = "RBLN_DEVICES";
  const char* list = text(name);
  if (!list) list = text(name = "RBLN_VISIBLE_DEVICES");
  const int present = settings().npus;
  if (!list) {
    for (int npu = 0; npu < present; ++npu) npus.push_back(npu);
    return true;
  }
  bool used[kMaxNpus] = {};
  const char* at = list;
  while (true) {
    char* end = nullptr;
    while (*at == ' ') ++at;
    long npu = std::strtol(at, &end, 10);
    bool number = end != at && *at >= '0' && *at <= '9';
    while (*end == ' ') ++end;
    if (!number || (*end && *end != ',')) {
      error = std::string(name) + "=" + list + " is not a comma-separated list of NPU numbers";
      return false;
    }
    if (npu >= present || used[npu]) {
      error = std::string(name) + "=" + list + ": NPU " + std::to_string(npu) +
              (npu < present
                   ? " is named twice"
                   : " does not exist (" + std::to_string(present) + " simulated; RBLN_SIM_NPUS)");
      return false;
    }
    used[npu] = true;
    npus.push_back(static_cast<int>(npu));
    if (!*end) return true;
    at = end + 1;
  }
}

void complain(const char* format, ...) {
  char line[768];
  const int head = std::snprintf(line, sizeof(line), "rbln-sim[%d]: ", static_cast<int>(getpid()));
  va_list arguments;
  va_start(arguments, format);
  int length = head + std::vsnprintf(line + head, sizeof(line) - head - 1, format, arguments);
  va_end(arguments);
  if (length > static_cast<int>(sizeof(line)) - 2) length = sizeof(line) - 2;
  line[length] = '\n';
  // One write, so that lines of several threads and processes do not mix.
  ssize_t written = write(STDERR_FILENO, line, length + 1);
  (void)written;
}

}  // namespace rbln_sim
