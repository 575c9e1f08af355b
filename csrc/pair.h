// EAGLE-3's decoder layer in one team of threads: the steps of stack.h on rows [norm(embedding); norm(state)].
// Keys and values of every row are written, the rest is computed for the kept rows only. Included by level.cpp only.

struct PairRows {
    StackRows layer;
    void *paired, *residual, *kept_q;
};

inline int64_t pair_floats(const PairArgs& a) {
    const StackArgs& s = a.stack;
    return stack_floats(s) + s.rows * (3 * s.hidden + query_width(s) + widened_stride(2 * s.hidden)) + 3 * 16;
}

inline PairRows pair_rows(const PairArgs& a, char* at) {
    const StackArgs& s = a.stack;
    auto take = [&](int64_t width) {
        char* begin = at;
        at += ceil_div(s.rows * width * (s.bf16 ? 2 : 4), 64) * 64;
        return static_cast<void*>(begin);
    };
    PairRows rows{};
    rows.paired = take(2 * s.hidden);
    rows.residual = take(s.hidden);
    rows.kept_q = take(query_width(s));
    rows.layer = stack_rows(s, at);
    return rows;
}

inline int64_t kept_row(const PairArgs& a, int64_t row) { return a.keep ? a.keep[row] : row; }

inline void copy_row(bool bf16, void* to, int64_t to_at, const void* from, int64_t from_at, int64_t width) {
    std::memcpy(row_at(to, bf16, to_at), row_at(const_cast<void*>(from), bf16, from_at), size_t(width * (bf16 ? 2 : 4)));
}

// Each row: the normed embedding of its token, then its normed state, which `next` reads.
inline void pair_up(const PairArgs& a, void* paired, const Product& next) {
    const StackArgs& s = a.stack;
    const Rows embedding_norm{s.layers[0].input_norm, 0, s.norm_bf16}, state_norm{a.state_norm, 0, s.norm_bf16};
#pragma omp for
    for (int64_t row = 0; row < s.rows; ++row) {
        void* embedding = row_at(const_cast<void*>(a.embedding), s.bf16, a.tokens[row] * s.hidden);
        void* state = row_at(const_cast<void*>(a.states), s.bf16, row * s.hidden);
        norm_row(embedding, s.bf16, embedding_norm, row_at(paired, s.bf16, 2 * row * s.hidden), s.hidden, s.eps,
                 s.round_last);
        norm_row(state, s.bf16, state_norm, row_at(paired, s.bf16, (2 * row + 1) * s.hidden), s.hidden, s.eps,
                 s.round_last);
        next(row);
    }
}

// What the kept rows go on with: their residual and their queries.
inline void keep_rows(const PairArgs& a, const PairRows& rows) {
    const StackArgs& s = a.stack;
    const int64_t width = query_width(s);
#pragma omp for
    for (int64_t row = 0; row < a.kept; ++row) {
        const int64_t from = kept_row(a, row);
        if (a.normed_residual)
            copy_row(s.bf16, rows.residual, row * s.hidden, rows.paired, (2 * from + 1) * s.hidden, s.hidden);
        else
            copy_row(s.bf16, rows.residual, row * s.hidden, a.states, from * s.hidden, s.hidden);
        copy_row(s.bf16, rows.kept_q, row * width, rows.layer.q, from * width, width);
    }
}

inline void add_rows(const StackArgs& s, const void* x, const void* other, void* y) {
#pragma omp for
    for (int64_t row = 0; row < s.rows; ++row)
        for (int64_t i = 0; i < s.hidden; i += 16) {
            const V sum = add(row_load(row_at(const_cast<void*>(x), s.bf16, row * s.hidden), s.bf16, i, s.hidden),
                              row_load(row_at(const_cast<void*>(other), s.bf16, row * s.hidden), s.bf16, i, s.hidden));
            row_store(row_at(y, s.bf16, row * s.hidden), s.bf16, i, s.hidden, sum);
        }
}

inline void pair_in_team(const PairArgs& a, const PairRows& rows) {
    const StackArgs& all = a.stack;
    const StackLayer& layer = all.layers[0];
    pair_up(a, rows.paired, reading(all, &layer.qkv, rows.paired, rows.layer.wide));
    product(all, layer.qkv, rows.paired, rows.layer.qkv, rows.layer.wide, true);
    rotate_layer(all, layer, 0, rows.layer);
    if (!a.kept) return;
    keep_rows(a, rows);
    StackArgs kept = all;
    kept.rows = a.kept;
    kept.residual = rows.residual;
    attend_layer(kept, layer, 0, rows.kept_q, rows.layer);
    product(kept, layer.output, rows.layer.mixed, rows.layer.output, rows.layer.wide, false);
    add_and_normalise(kept, rows.layer.output, layer.output_norm, layer.mlp_norm, &layer.gate_up, rows.layer);
    feed_forward(kept, layer, rows.layer);
    if (all.final_norm)
        normalise(kept, rows.layer.output, all.final_norm, rows.residual, all.final, {});
    else
        add_rows(kept, rows.layer.output, rows.residual, all.final);
}

void pair(const PairArgs& a) {
    Scratch scratch(pair_floats(a));
    const PairRows rows = pair_rows(a, reinterpret_cast<char*>(scratch.data));
#pragma omp parallel num_threads(a.stack.threads)
    pair_in_team(a, rows);
}
