// What the library tells the user while it runs.
#pragma once

#include <string_view>

namespace overspill::io {

/// Writes the line to stderr, with a line break behind it. Where stderr takes nothing (a pipe that nobody
/// reads, a full disk) the line is lost, and nothing else is: whoever warns goes on with its work. Threads:
/// any.
void say_on_stderr(std::string_view line) noexcept;

}  // namespace overspill::io
