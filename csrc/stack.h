// All decoder layers in one team of threads: the steps of linear.h, rows.h and attention.h one after the other, on the
// same dtypes, so the bits are those of the steps called one by one. Threads meet between steps without going to
// sleep, and no step pays for a call from Python. Included by level.cpp only.

// Rows between the steps. Only one layer's are alive at a time.
struct StackRows {
    void *normed, *qkv, *q, *mixed, *output, *gate_up, *gated;
    float* wide;  // input of a product in fp32
};

inline int64_t query_width(const StackArgs& a) { return a.heads * a.head_dim; }

inline StackRows stack_rows(const StackArgs& a, char* at) {
    const int64_t size = a.bf16 ? 2 : 4, all = query_width(a) + 2 * a.groups * a.head_dim;
    auto take = [&](int64_t width) {
        char* begin = at;
        at += ceil_div(a.rows * width * size, 64) * 64;
        return static_cast<void*>(begin);
    };
    StackRows rows{};
    rows.normed = take(a.hidden);
    rows.qkv = take(all);
    rows.q = take(query_width(a));
    rows.mixed = take(query_width(a));
    rows.output = take(a.hidden);
    rows.gate_up = take(2 * a.middle);
    rows.gated = take(a.middle);
    rows.wide = reinterpret_cast<float*>(at);
    return rows;
}

inline int64_t stack_floats(const StackArgs& a) {
    const int64_t widest = larger(larger(a.hidden, a.middle), query_width(a));
    const int64_t values = 3 * query_width(a) + 2 * a.groups * a.head_dim + 2 * a.hidden + 3 * a.middle;
    return a.rows * (values + widened_stride(widest)) + 8 * 16;
}

// A product of the rows of x, and where its prepared rows lie. Without a weight there is nothing to prepare.
struct Product {
    LinearArgs args;
    float* wide;
    bool there;
    void operator()(int64_t r) const {
        if (there) prepare_row(args, r, wide);
    }
};

inline Product reading(const StackArgs& a, const LinearArgs* weight, const void* x, float* wide) {
    if (!weight) return {{}, nullptr, false};
    LinearArgs args = *weight;
    args.x = {x, weight->in, a.bf16};
    args.rows = a.rows;
    args.threads = a.threads;
    return {args, wide, true};
}

// prepared: the step that made x has prepared its rows (see Product).
inline void product(const StackArgs& a, const LinearArgs& weight, const void* x, void* y, float* wide, bool prepared) {
    LinearArgs args = reading(a, &weight, x, wide).args;
    args.y = y;
    prepared ? product_in_team(args, wide) : linear_in_team(args, wide);
}

// next: the product that reads y; its rows are prepared while they are at hand.
inline void normalise(const StackArgs& a, const void* x, const void* weight, void* residual, void* y,
                      const Product& next) {
    const Rows other{residual, a.hidden, a.bf16};
    norm_in_team({{x, a.hidden, a.bf16}, residual ? &other : nullptr, {weight, 0, a.norm_bf16}, y, residual, a.rows,
                  a.hidden, a.eps, a.round_last, a.threads}, next);
}

// residual += x (normed first, if the family does so); normed = its norm, which `next` reads.
inline void add_and_normalise(const StackArgs& a, void* x, const void* own, const void* weight, const LinearArgs* next,
                              const StackRows& rows) {
    if (own) {
        normalise(a, x, own, nullptr, rows.normed, {});
        x = rows.normed;
    }
    normalise(a, x, weight, a.residual, rows.normed, reading(a, next, rows.normed, rows.wide));
}

inline void rotate_layer(const StackArgs& a, const StackLayer& layer, int64_t index, const StackRows& rows) {
    const Rows query{layer.query_norm, 0, layer.head_norm_bf16}, key{layer.key_norm, 0, layer.head_norm_bf16};
    const bool normed = layer.query_norm && layer.key_norm;
    rope_in_team({{rows.qkv, query_width(a) + 2 * a.groups * a.head_dim, a.bf16}, rows.q, a.keys[index],
                  a.values[index], a.kv_bf16, a.held, layer.cos, layer.sin, a.positions, a.slots, normed ? &query : nullptr,
                  normed ? &key : nullptr, layer.head_eps, layer.head_round_last, a.rows, a.heads, a.groups,
                  a.head_dim, a.threads});
}

inline void attend_layer(const StackArgs& a, const StackLayer& layer, int64_t index, const void* q,
                         const StackRows& rows) {
    AttentionArgs args = a.where;
    args.q = q;
    args.y = rows.mixed;
    args.keys = a.keys[index];
    args.values = a.values[index];
    args.window = layer.window;
    attention_in_team(args);
}

// output = the gated layers on `normed`, whose rows are prepared.
inline void feed_forward(const StackArgs& a, const StackLayer& layer, const StackRows& rows) {
    product(a, layer.gate_up, rows.normed, rows.gate_up, rows.wide, true);
    gated_in_team({{rows.gate_up, 2 * a.middle, a.bf16}, rows.gated, a.rows, a.middle, a.gelu, a.threads},
                  reading(a, &layer.down, rows.gated, rows.wide));
    product(a, layer.down, rows.gated, rows.output, rows.wide, true);
}

// Copies the rows after `layer` layers to where they were asked for.
inline void tap(const StackArgs& a, int64_t layer, const void* from) {
    const int64_t size = a.bf16 ? 2 : 4;
    for (int64_t i = 0; i < a.tap_count; ++i) {
        if (a.taps[i] != layer) continue;
#pragma omp for
        for (int64_t row = 0; row < a.rows; ++row)
            std::memcpy(static_cast<char*>(a.features) + (row * a.tap_count + i) * a.hidden * size,
                        static_cast<const char*>(from) + row * a.hidden * size, size_t(a.hidden * size));
    }
}

inline void stack_in_team(const StackArgs& a, const StackRows& rows) {
    tap(a, 0, a.residual);
    normalise(a, a.residual, a.layers[0].input_norm, nullptr, rows.normed,
              reading(a, &a.layers[0].qkv, rows.normed, rows.wide));
    for (int64_t index = 0; index < a.layer_count; ++index) {
        const StackLayer& layer = a.layers[index];
        const StackLayer* next = index + 1 < a.layer_count ? &a.layers[index + 1] : nullptr;
        product(a, layer.qkv, rows.normed, rows.qkv, rows.wide, true);
        rotate_layer(a, layer, index, rows);
        attend_layer(a, layer, index, rows.q, rows);
        product(a, layer.output, rows.mixed, rows.output, rows.wide, false);
        add_and_normalise(a, rows.output, layer.output_norm, layer.mlp_norm, &layer.gate_up, rows);
        feed_forward(a, layer, rows);
        add_and_normalise(a, rows.output, layer.mlp_output_norm, next ? next->input_norm : a.final_norm,
                          next ? &next->qkv : nullptr, rows);
        tap(a, index + 1, a.residual);
    }
    tap(a, kFinalTap, rows.normed);
#pragma omp for
    for (int64_t row = 0; row < a.rows; ++row) {
        const int64_t size = a.hidden * (a.bf16 ? 2 : 4);
        std::memcpy(static_cast<char*>(a.final) + row * size, static_cast<const char*>(rows.normed) + row * size,
                    size_t(size));
    }
}

void stack(const StackArgs& a) {
    Scratch scratch(stack_floats(a));
    const StackRows rows = stack_rows(a, reinterpret_cast<char*>(scratch.data));
#pragma omp parallel num_threads(a.threads)
    stack_in_team(a, rows);
}
