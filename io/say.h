// What the library tells the user while it runs.
#pragma once

#include <string_view>

namespace overspill::io {

/// Writes the line to stderr, with a line break behind it. Where stderr takes nothing (a closed pipe, a full
/// disk) the line is lost, and nothing else is: the caller goes on with its work. A stderr that stands still
/// (a pipe whose reader sleeps, a terminal after Ctrl-S, a file on a disk that hangs) holds the caller up for
/// a second, once; until it takes that line, later ones are lost. Threads: any.
void say_on_stderr(std::string_view line) noexcept;

}  // namespace overspill::io
