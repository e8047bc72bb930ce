#include "io/drive_wear.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/nvme_ioctl.h>
#include <sys/ioctl.h>

#include <array>
#include <cerrno>
#include <limits>
#include <system_error>

#include "io/unique_fd.h"

namespace overspill::io {
namespace {

constexpr size_t kPageBytes = 512;
constexpr uint8_t kGetLogPage = 0x02;
constexpr uint32_t kSmartLog = 0x02;
constexpr uint32_t kWholeController = 0xFFFFFFFF;
constexpr size_t kPercentageUsedAt = 5;
constexpr size_t kDataUnitsWrittenAt = 48;       // 16 bytes, little-endian
constexpr uint64_t kDataUnitBytes = 512 * 1000;  // the specification's

}  // namespace

std::optional<DriveWear> parse_smart_log(std::span<const std::byte> page) {
  if (page.size() < kPageBytes) return std::nullopt;
  uint64_t units = 0;
  bool beyond = false;
  for (size_t i = 0; i < 16; ++i) {
    const auto byte = std::to_integer<uint64_t>(page[kDataUnitsWrittenAt + i]);
    if (i < 8) units |= byte << 8 * i;
    beyond = beyond || (i >= 8 && byte != 0);
  }
  constexpr auto kMost = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  if (beyond || units > kMost / kDataUnitBytes) return std::nullopt;  // no drive has written that much
  return DriveWear{std::to_integer<int>(page[kPercentageUsedAt]),
                   static_cast<int64_t>(units * kDataUnitBytes)};
}

std::optional<DriveWear> read_drive_wear(const std::string& disk, std::string& why) {
  if (!disk.starts_with("nvme")) {
    why = fmt::format("{} is no NVMe drive", disk);
    return std::nullopt;
  }
  const UniqueFd fd(::open(("/dev/" + disk).c_str(), O_RDONLY | O_CLOEXEC));
  std::array<std::byte, kPageBytes> page{};
  nvme_admin_cmd command{};
  command.opcode = kGetLogPage;
  command.nsid = kWholeController;
  command.addr = reinterpret_cast<uintptr_t>(page.data());
  command.data_len = kPageBytes;
  command.cdw10 = kSmartLog | (kPageBytes / 4 - 1) << 16;
  const int status = fd ? ::ioctl(fd.get(), NVME_IOCTL_ADMIN_CMD, &command) : -1;
  if (status != 0) {
    why = status < 0 ? fmt::format("{}: {}", disk, std::generic_category().message(errno))
                     : fmt::format("{} answers with status {:#x}", disk, status);
    return std::nullopt;
  }
  const auto wear = parse_smart_log(page);
  if (!wear) why = fmt::format("{}: its SMART log makes no sense", disk);
  return wear;
}

}  // namespace overspill::io
