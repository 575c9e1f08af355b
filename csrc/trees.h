#pragma once

#include <nanobind/nanobind.h>

namespace alula {

void bind_trees(nanobind::module_& m);

}  // namespace alula
