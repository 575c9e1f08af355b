// Row-local steps: norm, rotation and cache write, gated activation, soft cap. Included by level.cpp only.
// Sums over a row: 16 lanes, value i in lane i mod 16, then lane_sum.

// Each step comes twice: `*_in_team` shares the rows among the threads that call it together and returns when all rows
// are done; the other one gathers the threads first.

constexpr int64_t kParallelValues = 16384;  // fewer are not worth waking other threads

inline float inverse_rms(const void* x, bool bf16, int64_t width, float eps) {
    V squares = zero();
    for (int64_t i = 0; i < width; i += 16) {
        const V value = row_load(x, bf16, i, width);
        squares = fma(value, value, squares);
    }
    return 1.0f / __builtin_sqrtf(lane_sum(squares) / float(width) + eps);
}

inline void norm_row(const void* x, bool bf16, const Rows& weight, void* y, int64_t width, float eps,
                     bool round_last) {
    const V scale = set1(inverse_rms(x, bf16, width, eps));
    for (int64_t i = 0; i < width; i += 16) {
        V value = mul(row_load(x, bf16, i, width), scale);
        if (!round_last) value = rounded(value, bf16);
        row_store(y, bf16, i, width, mul(value, row_load(weight.data, weight.bf16, i, width)));
    }
}

// then(r) follows each row.
template <class Then>
inline void norm_in_team(const NormArgs& a, Then then) {
    const bool bf16 = a.x.bf16;
#pragma omp for
    for (int64_t r = 0; r < a.rows; ++r) {
        const void* x = row_at(a.x, r);
        if (a.residual) {
            const void* residual = row_at(*a.residual, r);
            void* sum = row_at(a.sum, bf16, r * a.width);
            for (int64_t i = 0; i < a.width; i += 16) {
                const V value = row_load(x, bf16, i, a.width), other = row_load(residual, bf16, i, a.width);
                row_store(sum, bf16, i, a.width, add(value, other));
            }
            x = sum;
        }
        norm_row(x, bf16, a.weight, row_at(a.y, bf16, r * a.width), a.width, a.eps, a.round_last);
        then(r);
    }
}

void norm(const NormArgs& a) {
#pragma omp parallel num_threads(a.threads) if (a.rows * a.width > kParallelValues)
    norm_in_team(a, [](int64_t) {});
}

inline V silu(V x) { return div(x, add(set1(1.0f), vexp(sub(zero(), x)))); }

// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))): Hendrycks and Gimpel, arXiv 1606.08415, section 2.
inline V gelu_tanh(V x) {
    const V cube = mul(mul(x, x), x);
    const V inner = mul(set1(0.797884561f), fma(set1(0.044715f), cube, x));
    return mul(mul(set1(0.5f), x), add(set1(1.0f), vtanh(inner)));
}

template <class Then>
inline void gated_in_team(const GatedArgs& a, Then then) {
    const bool bf16 = a.x.bf16;
#pragma omp for
    for (int64_t r = 0; r < a.rows; ++r) {
        const void* gate = row_at(a.x, r);
        const void* up = row_at(const_cast<void*>(gate), bf16, a.width);
        void* y = row_at(a.y, bf16, r * a.width);
        for (int64_t i = 0; i < a.width; i += 16) {
            const V x = row_load(gate, bf16, i, a.width);
            const V active = rounded(a.gelu ? gelu_tanh(x) : silu(x), bf16);
            row_store(y, bf16, i, a.width, mul(active, row_load(up, bf16, i, a.width)));
        }
        then(r);
    }
}

void gated(const GatedArgs& a) {
#pragma omp parallel num_threads(a.threads) if (a.rows * a.width > kParallelValues)
    gated_in_team(a, [](int64_t) {});
}

void softcap(const Rows& x, void* y, int64_t rows, int64_t width, float cap, int threads) {
    const bool large = rows * width > kParallelValues;
#pragma omp parallel for num_threads(threads) if (large)
    for (int64_t r = 0; r < rows; ++r) {
        const void* from = row_at(x, r);
        void* to = row_at(y, x.bf16, r * width);
        for (int64_t i = 0; i < width; i += 16)
            row_store(to, x.bf16, i, width, capped(row_load(from, x.bf16, i, width), cap));
    }
}

// One head: pairs (i, i + half) turned by the angle of the position.
inline void rotate(const void* x, bool x_bf16, void* y, bool y_bf16, const float* cos, const float* sin, int64_t half) {
    const void* x_high = row_at(const_cast<void*>(x), x_bf16, half);
    void* y_high = row_at(y, y_bf16, half);
    for (int64_t i = 0; i < half; i += 16) {
        const V c = row_load(cos, false, i, half), s = row_load(sin, false, i, half);
        const V low = row_load(x, x_bf16, i, half), high = row_load(x_high, x_bf16, i, half);
        row_store(y, y_bf16, i, half, fma(low, c, sub(zero(), mul(high, s))));
        row_store(y_high, y_bf16, i, half, fma(high, c, mul(low, s)));
    }
}

inline void rope_row(const RopeArgs& a, int64_t row, void* normed) {
    const bool bf16 = a.qkv.bf16;
    const int64_t half = a.head_dim / 2, slot = a.slots[row];
    const float *cos = a.cos + a.positions[row] * half, *sin = a.sin + a.positions[row] * half;
    void* start = const_cast<void*>(row_at(a.qkv, row));
    for (int64_t h = 0; h < a.heads + a.groups; ++h) {
        const bool query = h < a.heads;
        const void* head = row_at(start, bf16, h * a.head_dim);
        if (const Rows* weight = query ? a.query_norm : a.key_norm) {
            norm_row(head, bf16, *weight, normed, a.head_dim, a.eps, a.round_last);
            head = normed;
        }
        const int64_t at = query ? (row * a.heads + h) * a.head_dim : ((h - a.heads) * a.held + slot) * a.head_dim;
        const bool to_bf16 = query ? bf16 : a.kv_bf16;
        rotate(head, bf16, row_at(query ? a.q : a.keys, to_bf16, at), to_bf16, cos, sin, half);
    }
    for (int64_t g = 0; g < a.groups; ++g) {
        const void* value = row_at(start, bf16, (a.heads + a.groups + g) * a.head_dim);
        void* to = row_at(a.values, a.kv_bf16, (g * a.held + slot) * a.head_dim);
        for (int64_t i = 0; i < a.head_dim; i += 16)
            row_store(to, a.kv_bf16, i, a.head_dim, row_load(value, bf16, i, a.head_dim));
    }
}

inline void rope_in_team(const RopeArgs& a) {
    Scratch normed(a.head_dim);
#pragma omp for
    for (int64_t r = 0; r < a.rows; ++r) rope_row(a, r, normed.data);
}

void rope(const RopeArgs& a) {
#pragma omp parallel num_threads(a.threads) if (a.rows * a.heads * a.head_dim > kParallelValues)
    rope_in_team(a);
}
