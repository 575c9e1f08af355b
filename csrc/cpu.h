// What the CPU at hand can run.
#pragma once

#include <vector>

#include "kernels.h"

namespace alula {

// Tables of the levels, those with the newest instructions first; portable is always there.
std::vector<const Table*> supported_levels();

}  // namespace alula
