// Something that is awaited, for code that computes meanwhile and does not come back to Python to ask.

#pragma once

namespace interlace {

constexpr char WATCH[] = "interlace.watch";  // of the capsule that holds one

struct Watch {
  bool (*there)(const void *of);
  const void *of;
};

}  // namespace interlace
