// libFuzzer over what reads the small files of a model folder.
#include <cstddef>
#include <cstdint>
#include <filesystem>

#include "tests/fuzz/model_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static overspill::fuzz::ModelTarget target(
      std::filesystem::is_directory("/dev/shm") ? "/dev/shm" : std::filesystem::temp_directory_path());
  target.run({reinterpret_cast<const char*>(data), size});
  return 0;
}
