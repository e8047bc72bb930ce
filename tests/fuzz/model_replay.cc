// Runs every file of the corpus through the fuzzer's target, without a fuzzer.   model_replay CORPUS
// Files called accept-* must be accepted, refuse-* refused.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "tests/fuzz/model_target.h"

int main(int argc, char** argv) {
  namespace fs = std::filesystem;
  if (argc != 2) {
    fmt::print(stderr, "model_replay CORPUS\n");
    return 2;
  }
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(argv[1])) files.push_back(entry.path());
  std::ranges::sort(files);
  overspill::fuzz::ModelTarget target(fs::temp_directory_path());
  int accepted_files = 0, wrong = 0;
  for (const fs::path& path : files) {
    std::ifstream file(path, std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), {}}, name = path.filename().string();
    fmt::print("{}\n", name);  // before it may crash
    std::fflush(stdout);
    const bool accepted = target.run(text);
    accepted_files += accepted ? 1 : 0;
    if (name.starts_with(accepted ? "refuse-" : "accept-")) {
      fmt::print("  was {}\n", accepted ? "accepted" : "refused");
      ++wrong;
    }
  }
  fmt::print("{} files, {} accepted, {} otherwise than their names say\n", files.size(), accepted_files,
             wrong);
  return wrong == 0 && accepted_files > 0 ? 0 : 1;
}
