// Python face of the kernels: addresses and sizes in, nothing out. Shapes and dtypes are checked by
// kernels/native.py; the interpreter lock is released while a kernel runs.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

#ifdef _OPENMP
#include <omp.h>
extern "C" int omp_pause_resource_all(omp_pause_resource_t) noexcept __attribute__((weak));  // OpenMP 5.0
#endif

#include "cpu.h"
#include "kernels.h"
#include "trees.h"
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

std::vector<std::string> level_names() {
    std::vector<std::string> names;
    for (const Table* table : supported_levels()) names.push_back(table->name);
    return names;
}

Format format_of(const std::string& name) {
    if (name == "fp32") return Format::fp32;
    if (name == "bf16") return Format::bf16;
    if (name == "int8") return Format::int8;
    if (name == "q8") return Format::q8;
    if (name == "q4") return Format::q4;
    throw std::invalid_argument("format is '" + name + "': give fp32, bf16, int8, q8 or q4");
}

// Of a packed weight; the same on every level.
int64_t packed_bytes(const std::string& name, int64_t in, int64_t out) {
    const Format format = format_of(name);
    const int64_t panels = (out + 15) / 16, groups = (in + kGroup - 1) / kGroup;
    if (format == Format::q4) return panels * groups * kNibbleBytes;
    if (format == Format::int8 || format == Format::q8) return panels * groups * kGroupBytes;
    return panels * 16 * in * (format == Format::bf16 ? 2 : 4);
}

AttentionArgs addressing(const Where& where) {
    AttentionArgs args{};
    args.runs = where.runs.data();
    args.run_count = int64_t(where.runs.size());
    args.count = where.count.data();
    args.first = where.first.data();
    args.shared = where.shared.data();
    args.prefix = where.prefix.data();
    args.tail = where.tail.data();
    args.tail_width = where.tail_width;
    args.rows = int64_t(where.count.size());
    return args;
}

class Level {
   public:
    explicit Level(const std::string& name) {
        for (const Table* level : supported_levels())
            if (level->name == name) table = level;
        if (!table) throw std::invalid_argument("level is '" + name + "': give one of levels()");
    }

    void pack(Address weight, bool bf16, const std::string& format, Address packed, int64_t in, int64_t out,
              int threads) const {
        table->pack({at<>(weight), bf16, format_of(format), at<>(packed), in, out, threads});
    }

    void pack_blocks(Address numbers, Address scales, Address least, const std::string& format, Address packed,
                     int64_t in, int64_t out, int threads) const {
        table->pack_blocks({at<>(numbers), at<const uint16_t>(scales), at<const uint16_t>(least), format_of(format),
                            at<>(packed), in, out, threads});
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
              int64_t held, Address cos, Address sin, Address positions, Address slots, Address query_norm,
              Address key_norm, bool norm_bf16, float eps, bool round_last, int64_t rows, int64_t heads,
              int64_t groups, int64_t head_dim, int threads) const {
        const Rows query{at<>(query_norm), 0, norm_bf16}, key{at<>(key_norm), 0, norm_bf16};
        const bool normed = query_norm && key_norm;
        table->rope({{at<>(qkv), stride, bf16}, at<>(q), at<>(keys), at<>(values), kv_bf16, held, at<const float>(cos),
                     at<const float>(sin), at<const int64_t>(positions), at<const int64_t>(slots),
                     normed ? &query : nullptr, normed ? &key : nullptr, eps, round_last, rows, heads, groups,
                     head_dim, threads});
    }

    void attention(const Where& where, Address q, Address y, bool bf16, Address keys, Address values, bool kv_bf16,
                   int64_t held, int64_t heads, int64_t groups, int64_t head_dim, int64_t window, float scale,
                   float softcap, int threads) const {
        AttentionArgs args = addressing(where);
        args.q = at<>(q);
        args.y = at<>(y);
        args.bf16 = bf16;
        args.keys = at<>(keys);
        args.values = at<>(values);
        args.kv_bf16 = kv_bf16;
        args.held = held;
        args.heads = heads;
        args.groups = groups;
        args.head_dim = head_dim;
        args.window = window;
        args.scale = scale;
        args.softcap = softcap;
        args.threads = threads;
        table->attention(args);
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

    void perturb(Address x, int64_t rows, int64_t width, Address temperature, Address key, Address ids, float scale,
                 int threads) const {
        table->perturb({at<float>(x), rows, width, at<const float>(temperature), at<const uint64_t>(key),
                        at<const int64_t>(ids), scale, threads});
    }

    void choose(Address x, int64_t stride, int64_t rows, int64_t width, Address temperature, Address top_k,
                Address top_p, Address min_p, Address key, Address index, int threads) const {
        table->choose({{at<const float>(x), stride, rows, width, threads}, at<const double>(temperature),
                       at<const int64_t>(top_k), at<const double>(top_p), at<const double>(min_p),
                       at<const uint64_t>(key)},
                      at<int64_t>(index));
    }

    const Table* table = nullptr;
};

// A packed weight, ready to multiply.
class PackedLinear {
   public:
    PackedLinear(const Level& level, Address weight, const std::string& format, Address bias, int64_t in, int64_t out,
                 bool out_bf16)
        : table_(level.table) {
        args_ = {{}, at<>(weight), format_of(format), at<const float>(bias), nullptr, out_bf16, 0, in, out, 1};
    }

    void multiply(Address x, int64_t stride, bool bf16, int64_t rows, Address y, int threads) const {
        LinearArgs args = args_;
        args.x = {at<>(x), stride, bf16};
        args.y = at<>(y);
        args.rows = rows;
        args.threads = threads;
        table_->linear(args);
    }

    const LinearArgs& args() const { return args_; }

   private:
    const Table* table_;
    LinearArgs args_;
};

// All layers of a decoder, run by one call.
class Stack {
   public:
    Stack(const Level& level, bool bf16, int64_t hidden, int64_t middle, int64_t heads, int64_t groups,
          int64_t head_dim, float scale, float softcap, float eps, bool round_last, bool gelu, Address final_norm,
          bool norm_bf16)
        : table_(level.table) {
        args_.bf16 = bf16;
        args_.hidden = hidden;
        args_.middle = middle;
        args_.heads = heads;
        args_.groups = groups;
        args_.head_dim = head_dim;
        args_.eps = eps;
        args_.round_last = round_last;
        args_.gelu = gelu;
        args_.final_norm = at<>(final_norm);
        args_.norm_bf16 = norm_bf16;
        scale_ = scale;
        softcap_ = softcap;
    }

    void add(const PackedLinear& qkv, const PackedLinear& output, const PackedLinear& gate_up,
             const PackedLinear& down, Address input_norm, Address output_norm, Address mlp_norm,
             Address mlp_output_norm, Address query_norm, Address key_norm, bool head_norm_bf16, float head_eps,
             bool head_round_last, Address cos, Address sin, int64_t window) {
        layers_.push_back({qkv.args(), output.args(), gate_up.args(), down.args(), at<>(input_norm),
                           at<>(output_norm), at<>(mlp_norm), at<>(mlp_output_norm), at<>(query_norm),
                           at<>(key_norm), head_norm_bf16, head_eps, head_round_last, at<const float>(cos),
                           at<const float>(sin), window});
    }

    void run(const Where& where, Address residual, Address final, const std::vector<Address>& keys,
             const std::vector<Address>& values, bool kv_bf16, int64_t held, Address positions, Address slots,
             const std::vector<int64_t>& taps, Address features, int threads) const {
        StackArgs args = arguments(where, keys, values, kv_bf16, held, positions, slots, threads);
        args.residual = at<>(residual);
        args.final = at<>(final);
        args.taps = taps.data();
        args.tap_count = int64_t(taps.size());
        args.features = at<>(features);
        args.rows = int64_t(where.count.size());
        table_->stack(args);
    }

    // All but rows and results. The vectors must outlive it.
    StackArgs arguments(const Where& where, const std::vector<Address>& keys, const std::vector<Address>& values,
                        bool kv_bf16, int64_t held, Address positions, Address slots, int threads) const {
        StackArgs args = args_;
        args.layers = layers_.data();
        args.layer_count = int64_t(layers_.size());
        args.keys = reinterpret_cast<void* const*>(keys.data());
        args.values = reinterpret_cast<void* const*>(values.data());
        args.kv_bf16 = kv_bf16;
        args.held = held;
        args.positions = at<const int64_t>(positions);
        args.slots = at<const int64_t>(slots);
        args.threads = threads;
        args.where = addressing(where);
        args.where.bf16 = args.bf16;
        args.where.kv_bf16 = kv_bf16;
        args.where.held = held;
        args.where.heads = args.heads;
        args.where.groups = args.groups;
        args.where.head_dim = args.head_dim;
        args.where.scale = scale_;
        args.where.softcap = softcap_;
        args.where.threads = threads;
        return args;
    }

    const Table* table() const { return table_; }

   private:
    const Table* table_;
    StackArgs args_{};
    std::vector<StackLayer> layers_;
    float scale_, softcap_;
};

// A layer over pairs of a token and a state, run by one call.
class Pair {
   public:
    Pair(const Stack& stack, Address embedding, int64_t vocabulary, Address state_norm, bool normed_residual,
         int64_t positions)
        : stack_(stack),
          embedding_(embedding),
          state_norm_(state_norm),
          vocabulary_(vocabulary),
          positions_(positions),
          normed_residual_(normed_residual) {}

    void run(const Where& kept_where, Address tokens, Address states, Address final, Address keys, Address values,
             bool kv_bf16, int64_t held, Address positions, Address slots, int64_t rows, Address keep, int64_t kept,
             int threads) const {
        check("token", at<const int64_t>(tokens), rows, vocabulary_);
        check("position", at<const int64_t>(positions), rows, positions_);
        if (kept > rows) throw std::invalid_argument("more rows are kept than there are: name each once");
        const std::vector<Address> all_keys{keys}, all_values{values};
        PairArgs args{stack_.arguments(kept_where, all_keys, all_values, kv_bf16, held, positions, slots, threads),
                      at<const int64_t>(tokens),
                      at<>(embedding_),
                      at<>(states),
                      at<>(state_norm_),
                      at<const int64_t>(keep),
                      kept,
                      normed_residual_};
        args.stack.rows = rows;
        args.stack.final = at<>(final);
        stack_.table()->pair(args);
    }

   private:
    static void check(const char* name, const int64_t* values, int64_t count, int64_t limit) {
        for (int64_t i = 0; i < count; ++i)
            if (values[i] < 0 || values[i] >= limit)
                throw std::invalid_argument(std::string(name) + " " + std::to_string(values[i]) +
                                            " is out of range: give 0 to " + std::to_string(limit - 1));
    }

    Stack stack_;
    Address embedding_, state_norm_;
    int64_t vocabulary_, positions_;
    bool normed_residual_;
};

// End the threads that wait for the calling thread's next parallel region. Threads of several pools spin less at every
// barrier once they outnumber the cores, and sleep instead: a forward then takes twice as long.
void release_threads() {
#ifdef _OPENMP
    if (omp_pause_resource_all) omp_pause_resource_all(omp_pause_soft);
#endif
}

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
    m.def("levels", &level_names, "Dispatch levels this CPU can run, those with the newest instructions first.");
    m.def("release_threads", &release_threads, release());
    m.attr("GROUP") = kGroup;
    m.def("packed_bytes", &packed_bytes, "format"_a, "in_features"_a, "out_features"_a);
    m.def("advise_large_pages", &advise_large_pages, "begin"_a, "size"_a);

    nb::class_<Where>(m, "Where")
        .def(
            "__init__",
            [](Where* self, uintptr_t sequence, uintptr_t table, uintptr_t prefix, uintptr_t tail, uintptr_t tail_len,
               uintptr_t first, uintptr_t positions, uintptr_t slots, int64_t rows, int64_t sequences, int64_t pages,
               int64_t tail_width, int64_t page_size, uintptr_t keep, int64_t kept) {
                new (self) Where({at<const int32_t>(sequence), at<const int32_t>(table), at<const int32_t>(prefix),
                                  at<const int32_t>(tail), at<const int32_t>(tail_len), at<const int32_t>(first),
                                  at<const int64_t>(positions), at<const int64_t>(slots), rows, sequences, pages,
                                  tail_width, page_size, at<const int64_t>(keep), kept});
            })
        .def_ro("highest_slot", &Where::highest_slot)
        .def_ro("highest_position", &Where::highest_position);

    nb::class_<Level>(m, "Level")
        .def(nb::init<const std::string&>())
        .def("pack", &Level::pack, release())
        .def("pack_blocks", &Level::pack_blocks, release())
        .def("norm", &Level::norm, release())
        .def("gated", &Level::gated, release())
        .def("rope", &Level::rope, release())
        .def("attention", &Level::attention, release())
        .def("softcap", &Level::softcap, release())
        .def("argmax", &Level::argmax, release())
        .def("topk", &Level::topk, release())
        .def("perturb", &Level::perturb, release())
        .def("choose", &Level::choose, release())
        .def("logsumexp", &Level::logsumexp, release())
        .def("softmax", &Level::softmax, release());

    nb::class_<PackedLinear>(m, "PackedLinear")
        .def(nb::init<const Level&, uintptr_t, const std::string&, uintptr_t, int64_t, int64_t, bool>())
        .def("multiply", &PackedLinear::multiply, release());

    nb::class_<Stack>(m, "Stack")
        .def(nb::init<const Level&, bool, int64_t, int64_t, int64_t, int64_t, int64_t, float, float, float, bool, bool,
                      uintptr_t, bool>())
        .def("add", &Stack::add)
        .def("run", &Stack::run, release());

    bind_trees(m);

    nb::class_<Pair>(m, "Pair")
        .def(nb::init<const Stack&, uintptr_t, int64_t, uintptr_t, bool, int64_t>())
        .def("run", &Pair::run, release());
}
