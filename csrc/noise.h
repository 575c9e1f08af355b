// Gumbel noise by counter, and the choice it makes: the numbers of sampling/noise.py with the same bits. Integers, and
// IEEE additions, multiplications and divisions in double, none of them fused. Included by level.cpp only.

constexpr int kDraws = 64;  // at a time, so that the loops over them become lanes
constexpr uint64_t kNoiseStep = 0x9E3779B97F4A7C15u;
constexpr double kLikelyDepth = 4.0;  // ids so much below the best are judged by their bits first
constexpr int64_t kMostLikely = 2048, kParallelDraws = 4096;
constexpr double kPrune = 1e-9;  // far above the errors of exp here, far below what separates noisy scores

// SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014).
inline uint64_t mixed_bits(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

inline uint64_t draw_bits(uint64_t key, int64_t id) { return mixed_bits(key + (uint64_t(id) + 1) * kNoiseStep); }

inline uint64_t double_to_bits(double x) {
    uint64_t u;
    std::memcpy(&u, &x, sizeof u);
    return u;
}
inline double bits_to_double(uint64_t u) {
    double x;
    std::memcpy(&x, &u, sizeof x);
    return x;
}
// Of a whole number below 2 ** 52.
inline double whole(uint64_t n) { return bits_to_double(n | 0x4330000000000000u) - 0x1p52; }

// 2 artanh((m - 1) / (m + 1)) + e ln 2 for x = m 2 ** e, sqrt(1/2) <= m < sqrt(2). Positive normal numbers only.
inline double exact_log(double x) {
    const uint64_t u = double_to_bits(x);
    const double fraction = bits_to_double((u & 0x000fffffffffffffu) | 0x3fe0000000000000u);
    const double low = fraction < 0.7071067811865476 ? 1.0 : 0.0;
    const double m = fraction + fraction * low, s = (m - 1.0) / (m + 1.0), z = s * s;
    double series = 2.0 / 21;
    series = series * z + 2.0 / 19;
    series = series * z + 2.0 / 17;
    series = series * z + 2.0 / 15;
    series = series * z + 2.0 / 13;
    series = series * z + 2.0 / 11;
    series = series * z + 2.0 / 9;
    series = series * z + 2.0 / 7;
    series = series * z + 2.0 / 5;
    series = series * z + 2.0 / 3;
    const double tail = s * z * series;
    return (whole(u >> 52) - 1022.0 - low) * 0.6931471805599453 + (s + s + tail);
}

// The top 52 bits as a number between 0 and 1 make -log(-log u).
inline double gumbel_of(uint64_t bits) { return -exact_log(-exact_log((whole(bits >> 12) + 0.5) * 0x1p-52)); }

// Adds noise to columns begin .. end - 1; it is drawn once for rows of one key that follow each other.
inline void perturb_block(const NoiseArgs& a, int64_t begin, int64_t end) {
    float noise[kDraws];
    int64_t drawn = -1;  // the row it was drawn for
    for (int64_t r = 0; r < a.rows; ++r) {
        if (!(a.temperature[r] > 0)) continue;
        if (drawn < 0 || a.key[r] != a.key[drawn])
            for (int64_t i = begin; i < end; ++i) noise[i - begin] = float(gumbel_of(draw_bits(a.key[r], a.ids[i])));
        drawn = r;
        float* x = a.x + r * a.width;
        for (int64_t i = begin; i < end; ++i) x[i] = (x[i] / a.temperature[r] + noise[i - begin]) / a.scale;
    }
}

// x = (x / temperature + noise) / scale, in fp32.
void perturb(const NoiseArgs& a) {
#pragma omp parallel for num_threads(a.threads) if (a.rows * a.width > kParallelDraws)
    for (int64_t begin = 0; begin < a.width; begin += kDraws)
        perturb_block(a, begin, smaller(begin + kDraws, a.width));
}

struct Winner {
    double key = -__builtin_inf();
    int64_t id = 0;
    void offer(double other, int64_t other_id) {
        if (other > key || (other == key && other_id < id)) key = other, id = other_id;
    }
};

// One row, its temperature, and the key of its noise.
struct Contest {
    const float* x;
    int64_t width;
    double temperature;
    uint64_t key;

    void offer(Winner& winner, int64_t id, uint64_t bits) const {
        winner.offer(double(x[id]) / temperature + gumbel_of(bits), id);
    }
};

// The bits that noise of at least `level` needs at least.
inline uint64_t least_bits(double level) {
    level -= kPrune;
    const double chance = -expm1(-exp(-(level > -30.0 ? level : -30.0)));
    const double reaching = chance * (1 + kPrune) * 0x1p64 + 0x1p14;
    return reaching < 0x1p64 ? uint64_t(0) - uint64_t(reaching) : 0;
}

// The bits with which an id that scores at most `rest` without its noise may beat the winner.
inline uint64_t bits_to_beat(const Winner& winner, double rest) {
    const double slack = 1e-6 * (1.0 + (rest < 0 ? -rest : rest));
    return least_bits(winner.key - rest - slack);
}

// `depth` below the best logit, and finite: masked ids lie lower.
inline float floor_below(float top, double depth) {
    const double floor = double(top) - depth, lowest = -double(__FLT_MAX__);
    return float(floor > lowest ? floor : lowest);
}

// The best of the likely ids (logits above `floor`), and the least bits with which another one, which scores at most
// `rest` without its noise, may beat it.
inline uint64_t first_look(const Contest& row, Winner& winner) {
    const float top = top_of(row.x, 0, row.width);
    const float floor = floor_below(top, kLikelyDepth * row.temperature);
    int64_t likely = 0;
    for (int64_t begin = 0; begin < row.width && likely < kMostLikely; begin += kTopBlock) {
        const int64_t end = smaller(begin + kTopBlock, row.width);
        if (!(top_of(row.x, begin, end) > floor)) continue;
        for (int64_t id = begin; id < end; ++id)
            if (row.x[id] > floor) ++likely, row.offer(winner, id, draw_bits(row.key, id));
    }
    double rest = double(floor) / row.temperature;
    if (likely == 0 || likely >= kMostLikely) {
        for (int64_t id = 0; id < row.width; ++id)
            if (row.x[id] == top) row.offer(winner, id, draw_bits(row.key, id));
        rest = double(top) / row.temperature;
    }
    return bits_to_beat(winner, rest);
}

// Ids begin .. end - 1 whose bits are large enough to win.
inline void second_look(const Contest& row, uint64_t least, int64_t begin, int64_t end, Winner& winner) {
    for (int64_t at = begin; at < end; at += kDraws) {
        uint64_t bits[kDraws], most = 0;
        for (int i = 0; i < kDraws; ++i) bits[i] = draw_bits(row.key, at + i);
        for (int i = 0; i < kDraws; ++i) most = bits[i] > most ? bits[i] : most;
        if (most < least) continue;
        for (int64_t i = 0; i < smaller(kDraws, end - at); ++i)
            if (bits[i] >= least) row.offer(winner, at + i, bits[i]);
    }
}

// The id with the largest logit / temperature + noise, the lowest of equals; `found` has room for each thread's own.
inline int64_t noisy_argmax(const Contest& row, Winner* found, int64_t threads) {
    for (int64_t t = 0; t < threads; ++t) found[t] = Winner{};
    const uint64_t least = first_look(row, found[0]);
#pragma omp parallel for num_threads(threads) if (row.width > kParallelValues)
    for (int64_t t = 0; t < threads; ++t) {
        Winner own = found[t];  // in registers: neighbours in memory are another thread's
        second_look(row, least, row.width * t / threads, row.width * (t + 1) / threads, own);
        found[t] = own;
    }
    Winner best = found[0];
    for (int64_t t = 1; t < threads; ++t) best.offer(found[t].key, found[t].id);
    return best.id;
}
