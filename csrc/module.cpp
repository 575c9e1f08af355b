// Python face of the kernels: addresses and sizes in, nothing out. Shapes and dtypes are checked by
// kernels/native.py; the interpreter lock is released while a kernel runs.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "kernels.h"
#include "where.h"

namespace nb = nanobind;
using namespace nb::literals;
using nb::call_guard;
using nb::gil_scoped_release;

namespace alula {
namespace {

using Address = uintptr_t;

template <class T = void>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

std::vector<const Table*> supported_levels() {
    std::vector<const Table*> found;
#ifdef ALULA_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        found.push_back(&table_avx512());
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(&table_avx2());
#endif
    found.push_back(&table_portable());
    return found;
}

std::vector<std::string> level_names() {
    std::vector<std::string> names;
    for (const Table* table : supported_levels()) names.push_back(table->name);
    return names;
}

class Level {
   public:
    explicit Level(const std::string& name) {
        for (const Table* level : supported_levels())
            if (level->name == name) table = level;
        if (!table) throw std::invalid_argument("level is '" + name + "': give one of levels()");
    }

    void pack(Address weight, bool bf16, Address packed, int64_t in, int64_t out, int threads) const {
        table->pack({at<>(weight), bf16, at<>(packed), in, out, threads});
    }

    void norm(Address x, int64_t stride, bool bf16, Address residual, int64_t residual_stride, Address weight,
              bool weight_bf16, Address y, Address sum, int64_t rows, int64_t width, float eps, bool round_last,
              int threads) const {
        const Rows other{at<>(residual), residual_stride, bf16};
        table->norm({{at<>(x), stride, bf16}, residual ? &other : nullptr, {at<>(weight), 0, weight_bf16}, at<>(y),
                     at<>(sum), rows, width, eps, round_last, threads});
    }

    void gated(Address x, int64_t stride, bool bf16, Address y, int64_t rows, int64_t width, bool gelu,
               int threads) const {
        table->gated({{at<>(x), stride, bf16}, at<>(y), rows, width, gelu, threads});
    }

    void rope(Address qkv, int64_t stride, bool bf16, Address q, Address keys, Address values, bool kv_bf16,
              Address cos, Address sin, Address positions, Address slots, Address query_norm, Address key_norm,
              bool norm_bf16, float eps, bool round_last, int64_t rows, int64_t heads, int64_t groups,
              int64_t head_dim, int threads) const {
        const Rows query{at<>(query_norm), 0, norm_bf16}, key{at<>(key_norm), 0, norm_bf16};
        const bool normed = query_norm && key_norm;
        table->rope({{at<>(qkv), stride, bf16}, at<>(q), at<>(keys), at<>(values), kv_bf16, at<const float>(cos),
                     at<const float>(sin), at<const int64_t>(positions), at<const int64_t>(slots),
                     normed ? &query : nullptr, normed ? &key : nullptr, eps, round_last, rows, heads, groups,
                     head_dim, threads});
    }

    void attention(const Where& where, Address q, Address y, bool bf16, Address keys, Address values, bool kv_bf16,
                   int64_t heads, int64_t groups, int64_t head_dim, int64_t window, float scale, float softcap,
                   int threads) const {
        table->attention({at<>(q), at<>(y), bf16, at<>(keys), at<>(values), kv_bf16, where.runs.data(),
                          int64_t(where.runs.size()), where.count.data(), where.first.data(), where.shared.data(),
                          where.prefix.data(), where.tail.data(), where.tail_width, int64_t(where.count.size()),
                          heads, groups, head_dim, window, scale, softcap, threads});
    }

    void softcap(Address x, int64_t stride, bool bf16, Address y, int64_t rows, int64_t width, float cap,
                 int threads) const {
        table->softcap({at<>(x), stride, bf16}, at<>(y), rows, width, cap, threads);
    }

    void argmax(Address x, int64_t stride, int64_t rows, int64_t width, Address index, int threads) const {
        table->argmax({at<const float>(x), stride, rows, width, threads}, at<int64_t>(index));
    }

    void topk(Address x, int64_t stride, int64_t rows, int64_t width, int64_t k, Address values, Address index,
              int threads) const {
        table->topk({at<const float>(x), stride, rows, width, threads}, k, at<float>(values), at<int64_t>(index));
    }

    void logsumexp(Address x, int64_t stride, int64_t rows, int64_t width, Address y, int threads) const {
        table->logsumexp({at<const float>(x), stride, rows, width, threads}, at<float>(y));
    }

    void softmax(Address x, int64_t stride, int64_t rows, int64_t width, Address y, bool logarithm,
                 int threads) const {
        table->softmax({at<const float>(x), stride, rows, width, threads}, at<float>(y), logarithm);
    }

    const Table* table = nullptr;
};

// A packed weight, ready to multiply.
class PackedLinear {
   public:
    PackedLinear(const Level& level, Address weight, bool bf16, Address bias, int64_t in, int64_t out, bool out_bf16)
        : table_(level.table) {
        args_ = {{}, at<>(weight), bf16, at<const float>(bias), nullptr, out_bf16, 0, in, out, 1};
    }

    void multiply(Address x, int64_t stride, bool bf16, int64_t rows, Address y, int threads) const {
        LinearArgs args = args_;
        args.x = {at<>(x), stride, bf16};
        args.y = at<>(y);
        args.rows = rows;
        args.threads = threads;
        table_->linear(args);
    }

   private:
    const Table* table_;
    LinearArgs args_;
};

// Ask for large pages under memory not touched yet: a weight read once per token should not wait for page tables.
void advise_large_pages(Address begin, int64_t bytes) {
#ifdef __linux__
    constexpr Address page = 4096;
    const Address low = (begin + page - 1) / page * page, high = (begin + Address(bytes)) / page * page;
    if (low < high) madvise(at<>(low), high - low, MADV_HUGEPAGE);  // a hint: failure changes nothing
#endif
}

}  // namespace
}  // namespace alula

NB_MODULE(_native, m) {
    using namespace alula;
    using release = call_guard<gil_scoped_release>;
    m.def("levels", &level_names, "Dispatch levels this CPU can run, fastest first.");
    m.def("advise_large_pages", &advise_large_pages, "begin"_a, "size"_a);

    nb::class_<Where>(m, "Where")
        .def(
            "__init__",
            [](Where* self, uintptr_t sequence, uintptr_t table, uintptr_t prefix, uintptr_t tail, uintptr_t tail_len,
               uintptr_t first, uintptr_t positions, uintptr_t slots, int64_t rows, int64_t sequences, int64_t pages,
               int64_t tail_width, int64_t page_size) {
                new (self) Where({at<const int32_t>(sequence), at<const int32_t>(table), at<const int32_t>(prefix),
                                  at<const int32_t>(tail), at<const int32_t>(tail_len), at<const int32_t>(first),
                                  at<const int64_t>(positions), at<const int64_t>(slots), rows, sequences, pages,
                                  tail_width, page_size});
            })
        .def_ro("highest_slot", &Where::highest_slot)
        .def_ro("highest_position", &Where::highest_position);

    nb::class_<Level>(m, "Level")
        .def(nb::init<const std::string&>())
        .def("pack", &Level::pack, release())
        .def("norm", &Level::norm, release())
        .def("gated", &Level::gated, release())
        .def("rope", &Level::rope, release())
        .def("attention", &Level::attention, release())
        .def("softcap", &Level::softcap, release())
        .def("argmax", &Level::argmax, release())
        .def("topk", &Level::topk, release())
        .def("logsumexp", &Level::logsumexp, release())
        .def("softmax", &Level::softmax, release());

    nb::class_<PackedLinear>(m, "PackedLinear")
        .def(nb::init<const Level&, uintptr_t, bool, uintptr_t, int64_t, int64_t, bool>())
        .def("multiply", &PackedLinear::multiply, release());
}
