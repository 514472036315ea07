#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>

#include "effinfer/device.h"

namespace effinfer {
namespace {

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// "always [madvise] never": the word in brackets.
std::string read_huge_pages() {
  const std::string line = first_line("/sys/kernel/mm/transparent_hugepage/enabled");
  const size_t begin = line.find('[');
  const size_t end = line.find(']');
  if (begin == std::string::npos || end == std::string::npos || end < begin) return "unavailable";
  const std::string word = line.substr(begin + 1, end - begin - 1);
  return word == "always" || word == "madvise" || word == "never" ? word : "unavailable";
}

// "0", "0-3", "0,2-5".
int read_numa_nodes() {
  std::istringstream list(first_line("/sys/devices/system/node/online"));
  int count = 0;
  for (std::string range; std::getline(list, range, ',');) {
    std::istringstream text(range);
    int first = 0;
    char dash = 0;
    int last = 0;
    if (!(text >> first)) continue;
    count += text >> dash >> last && dash == '-' ? std::max(1, last - first + 1) : 1;
  }
  return std::max(1, count);
}

}  // namespace

const MemoryFeatures& memory_features() {
  static const MemoryFeatures features{read_huge_pages(), read_numa_nodes()};
  return features;
}

}  // namespace effinfer
