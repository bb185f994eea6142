// Attention over the paged KV cache: see rollout/attention.py, whose torch code gives the same result.
//
// A tile is a run of tokens that see the same prompt blocks: samples of one prompt, or neighbours in a prompt being
// read. All query heads of a tile that share a key/value head are multiplied with each block at once, so the prompt is
// read once per tile; then each token goes on, alone, over its own blocks. Softmax is online. A token's result does
// not depend on the others of its tile, bit for bit.
//
// Layout of one layer: keys [N, K, D, BLOCK], values [N, K, BLOCK, D]. So scores and mixed values are one kind of
// product: rows of factors (queries, or probabilities) times the rows of blocks.

#include "vectors.h"

#include <limits>
#include <vector>

namespace {

constexpr int BLOCK = 32;
constexpr int RUN = 8;  // blocks between two rescalings of the online softmax
constexpr int CHUNK = RUN * BLOCK;
constexpr int ROWS = 6;  // of factors at a time
constexpr int STEP = 4;  // rows of a block at a time: factors are filled up to a multiple of it with zeros

// out[r][0:width] = sum over i < count of factors[r][i] * block[i][0:width], for R rows; the blocks, of `length` rows
// each, follow on each other. What lies at the same places of `ahead` is wanted next.
template <int R, class T, class A>
void product_rows(const A* factors, int ld, const T* const* blocks, const T* const*, int length, int count, int width,
                  A* out, int out_ld) {
    using V = typename Lanes<A>::type;
    constexpr int W = Lanes<A>::count;
    int c = 0;
    for (; c + 2 * W <= width; c += 2 * W) {
        V sum[R][2] = {};
        for (int begin = 0; begin < count; begin += length) {
            const T* row = blocks[begin / length] + c;
            for (int i = begin; i < std::min(begin + length, count); i++, row += width) {
                const V left = load(row), right = load(row + W);
                for (int r = 0; r < R; r++) {
                    sum[r][0] += factors[r * ld + i] * left;
                    sum[r][1] += factors[r * ld + i] * right;
                }
            }
        }
        for (int r = 0; r < R; r++)
            for (int i = 0; i < 2; i++) store(out + r * out_ld + c + i * W, sum[r][i]);
    }
    for (; c < width; c++)
        for (int r = 0; r < R; r++) {
            A sum = 0;
            for (int i = 0; i < count; i++)
                sum += factors[r * ld + i] * widen(blocks[i / length][i % length * width + c]);
            out[r * out_ld + c] = sum;
        }
}

#if defined(__AVX512BF16__)
// By pairs: two rows of a block with their numbers side by side. Even and odd pairs are summed apart, as few rows of
// factors would have every sum wait for itself.
template <int R>
void product_rows(const bf16* factors, int ld, const bf16* const* blocks, const bf16* const* ahead, int length,
                  int count, int width, float* out, int out_ld) {
    for (int c = 0; c < width; c += 32) {
        const __mmask32 inside = width - c >= 32 ? ~0u : (1u << (width - c)) - 1;
        __m512 sum[2][R][2] = {};
        for (int begin = 0; begin < count; begin += length) {
            const bf16 *block = blocks[begin / length] + c, *next = ahead[begin / length] + c;
            const int rows = std::min(length, count - begin);
            const auto row = [&](int i) {
                __builtin_prefetch(next + i * width);
                return _mm512_maskz_loadu_epi16(inside, block + i * width);
            };
            const auto add = [&](int chain, int i, __m512i even, __m512i odd) {
                const __m512bh low = (__m512bh)_mm512_unpacklo_epi16(even, odd);
                const __m512bh high = (__m512bh)_mm512_unpackhi_epi16(even, odd);
                for (int r = 0; r < R; r++) {
                    int32_t pair;
                    std::memcpy(&pair, factors + r * ld + begin + i, sizeof pair);
                    const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
                    sum[chain][r][0] = _mm512_dpbf16_ps(sum[chain][r][0], both, low);
                    sum[chain][r][1] = _mm512_dpbf16_ps(sum[chain][r][1], both, high);
                }
            };
            int i = 0;
            for (; i + STEP <= rows; i += STEP) {
                add(0, i, row(i), row(i + 1));
                add(1, i + 2, row(i + 2), row(i + 3));
            }
            // Behind the last row there may be anything, and 0 x NaN is NaN.
            const __m512i none = _mm512_setzero_si512();
            if (i < rows) add(0, i, row(i), i + 1 < rows ? row(i + 1) : none);
            if (i + 2 < rows) add(1, i + 2, row(i + 2), none);
        }
        // Side by side the columns came in fours: 0-3, 8-11, 16-19, 24-27, and those between.
        const __m512i first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
        const __m512i second = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
        for (int r = 0; r < R; r++) {
            const __m512d low = (__m512d)(sum[0][r][0] + sum[1][r][0]), high = (__m512d)(sum[0][r][1] + sum[1][r][1]);
            float* to = out + r * out_ld + c;
            _mm512_mask_storeu_ps(to, inside, (__m512)_mm512_permutex2var_pd(low, first, high));
            _mm512_mask_storeu_ps(to + 16, inside >> 16, (__m512)_mm512_permutex2var_pd(low, second, high));
        }
    }
}
template <class T> using Factor = T;
#else
template <class T> using Factor = typename Accumulate<T>::type;
#endif

template <class T> Factor<T> as_factor(T x) {
    if constexpr (std::is_same_v<T, Factor<T>>) return x;
    else return widen(x);
}

template <class T, class Q, class A>
void product(int rows, const Q* factors, int ld, const T* const* blocks, const T* const* ahead, int length, int count,
             int width, A* out, int out_ld) {
    for (; rows >= ROWS; rows -= ROWS, factors += ROWS * ld, out += ROWS * out_ld)
        product_rows<ROWS>(factors, ld, blocks, ahead, length, count, width, out, out_ld);
    switch (rows) {
#define REST(R) \
    case R: return product_rows<R>(factors, ld, blocks, ahead, length, count, width, out, out_ld);
        REST(1) REST(2) REST(3) REST(4) REST(5)
#undef REST
    }
}

// Where the keys and values of some tokens lie, of one head.
template <class T> struct Cached {
    const T *keys, *values;
    size_t stride;  // from block to block
    const int32_t* blocks;
    int count;
    const T* key(int b) const { return keys + blocks[b] * stride; }
    const T* value(int b) const { return values + blocks[b] * stride; }
};

// What a tile is computed in: rows are tokens times the query heads of a key/value head.
template <class T> struct Workspace {
    using A = typename Accumulate<T>::type;
    int ld;  // of queries
    std::vector<Factor<T>> q, p;
    std::vector<A> scores, mixed, out, peak, total, keep;
    std::vector<int> low, high;
    void fit(int rows, int tokens, int D) {
        ld = (D + STEP - 1) / STEP * STEP;
        q.assign(size_t(rows) * ld, Factor<T>{});
        p.resize(size_t(rows) * CHUNK);
        scores.resize(size_t(rows) * CHUNK);
        mixed.resize(size_t(rows) * D);
        out.assign(size_t(rows) * D, A(0));
        peak.assign(rows, -std::numeric_limits<A>::infinity());
        total.assign(rows, A(0));
        keep.resize(rows);
        low.resize(tokens);
        high.resize(tokens);
    }
};

// Scores [count] become probabilities up to a common factor, zero outside of [low, high); `peak` and `total` of the
// keys so far go on. Returns what the sums so far are to be multiplied with.
template <class A, class P>
A softmax(A* scores, P* p, int count, int low, int high, A scale, A& peak, A& total) {
    using V = typename Lanes<A>::type;
    using Index = decltype(V{} < V{});
    constexpr int W = Lanes<A>::count;
    if (low >= high) {
        std::memset((void*)p, 0, count * sizeof(P));
        return 1;
    }
    Index lane;
    for (int i = 0; i < W; i++) lane[i] = i;
    V top = V{} + peak;
    for (int j = 0; j < count; j += W) {
        const Index at = lane + j;
        const V x = (at >= low) & (at < high) ? load(scores + j) * scale : V{} - std::numeric_limits<A>::infinity();
        store(scores + j, x);
        top = x > top ? x : top;
    }
    const A highest = reduce_max(top), keep = exp_vector(V{} + (peak - highest))[0];
    V sum{};
    for (int j = 0; j < count; j += W) {
        const V e = exp_vector(load(scores + j) - highest);
        store(p + j, e);
        sum += e;
    }
    peak = highest;
    total = total * keep + reduce_sum(sum);
    return keep;
}

// Go on with the softmax of tokens [first, first + tokens) over the keys of `here`; key j of them is visible to a token
// when low <= j < high. `next` is asked for meanwhile: blocks are too short for the processor to see where the reading
// goes.
template <class T, class A>
void accumulate(Workspace<T>& w, int first, int tokens, int group, const Cached<T>& here, const Cached<T>& next, int D,
                A scale) {
    int begin = std::numeric_limits<int>::max(), end = 0;
    for (int t = first; t < first + tokens; t++) {
        if (w.low[t] >= w.high[t]) continue;
        begin = std::min(begin, w.low[t]);
        end = std::max(end, w.high[t]);
    }
    const int rows = tokens * group, row = first * group;
    A* const out = w.out.data() + size_t(row) * D;
    // Chunks begin at multiples of CHUNK, so that a row's sums do not depend on the rows beside it.
    for (int chunk = begin / CHUNK * CHUNK; chunk < end; chunk += CHUNK) {
        const int start = std::max(chunk, begin / BLOCK * BLOCK), stop = std::min(chunk + CHUNK, end);
        const int blocks = (stop - start + BLOCK - 1) / BLOCK;
        const T *keys[RUN], *values[RUN], *keys_ahead[RUN], *values_ahead[RUN];
        for (int b = 0; b < blocks; b++) {
            const int at = start / BLOCK + b;
            keys[b] = here.key(at);
            values[b] = here.value(at);
            keys_ahead[b] = b < next.count ? next.key(b) : keys[b];
            values_ahead[b] = b < next.count ? next.value(b) : values[b];
        }
        for (int b = 0; b < blocks; b++)
            product(rows, w.q.data() + size_t(row) * w.ld, w.ld, keys + b, keys_ahead + b, D, D, BLOCK,
                    w.scores.data() + b * BLOCK, CHUNK);
        for (int r = 0; r < rows; r++) {
            const int t = first + r / group;
            w.keep[r] = softmax(w.scores.data() + r * CHUNK, w.p.data() + r * CHUNK, blocks * BLOCK, w.low[t] - start,
                                std::min(w.high[t], stop) - start, scale, w.peak[row + r], w.total[row + r]);
        }
        product(rows, w.p.data(), CHUNK, values, values_ahead, BLOCK, stop - start, D, w.mixed.data(), D);
        for (int r = 0; r < rows; r++)
            for (int d = 0; d < D; d++) out[r * D + d] = out[r * D + d] * w.keep[r] + w.mixed[r * D + d];
    }
}

}  // namespace

extern "C" {

// What one step asks of every layer; see `Plan` in attention.py.
struct Plan {
    int32_t tokens, tiles;
    const int32_t *positions, *prefix, *slots, *own_begin;          // [tokens]
    const int32_t *tile_start, *shared_begin;                       // [tiles + 1], [tiles]
    const int32_t* blocks;
};
struct Call {
    const void *query, *key, *value;
    void *out, *keys, *values;
    int64_t query_token, query_head, key_token, key_head, value_token, value_head;  // strides in elements
    int32_t heads, kv_heads, head_dim, window, threads;             // window 0: none
    double scale;
};
}

namespace {

template <class T>
void write_token(const Plan& plan, const Call& c, int t) {
    const int D = c.head_dim, block = plan.slots[t] / BLOCK, place = plan.slots[t] % BLOCK;
    for (int h = 0; h < c.kv_heads; h++) {
        const size_t base = (size_t(block) * c.kv_heads + h) * D * BLOCK;
        const T* k = static_cast<const T*>(c.key) + t * c.key_token + h * c.key_head;
        const T* v = static_cast<const T*>(c.value) + t * c.value_token + h * c.value_head;
        T* key = static_cast<T*>(c.keys) + base + place;
        for (int d = 0; d < D; d++) key[d * BLOCK] = k[d];
        std::memcpy(static_cast<T*>(c.values) + base + size_t(place) * D, v, D * sizeof(T));
    }
}

template <class T>
Cached<T> cached(const Plan& plan, const Call& c, int h, int begin, int keys) {
    const size_t size = size_t(c.head_dim) * BLOCK;
    return {static_cast<const T*>(c.keys) + h * size, static_cast<const T*>(c.values) + h * size, c.kv_heads * size,
            plan.blocks + begin, (keys + BLOCK - 1) / BLOCK};
}
template <class T>
Cached<T> cached_prompt(const Plan& plan, const Call& c, int tile, int h) {
    const int last = plan.tile_start[tile + 1] - 1;
    return cached<T>(plan, c, h, plan.shared_begin[tile], std::min(plan.prefix[last], plan.positions[last] + 1));
}
template <class T>
Cached<T> cached_own(const Plan& plan, const Call& c, int t, int h) {
    return cached<T>(plan, c, h, plan.own_begin[t], plan.positions[t] + 1 - plan.prefix[t]);
}

template <class T>
void attend_tile(const Plan& plan, const Call& c, int unit) {
    using A = typename Accumulate<T>::type;
    static thread_local Workspace<T> w;
    const int tile = unit / c.kv_heads, h = unit % c.kv_heads, D = c.head_dim, group = c.heads / c.kv_heads;
    const int first = plan.tile_start[tile], end = plan.tile_start[tile + 1], tokens = end - first;
    const A scale = A(c.scale);
    // What is read after token t of this tile; the thread's next tile is likely this one.
    const int next_unit = std::min(unit + c.threads, plan.tiles * c.kv_heads - 1);
    const auto after = [&](int t) {
        if (t + 1 < end && plan.own_begin[t + 1] >= 0) return cached_own<T>(plan, c, t + 1, h);
        return cached_prompt<T>(plan, c, next_unit / c.kv_heads, next_unit % c.kv_heads);
    };
    w.fit(tokens * group, tokens, D);
    for (int t = 0; t < tokens; t++) {
        const int position = plan.positions[first + t];
        w.low[t] = c.window ? std::max(0, position + 1 - c.window) : 0;
        w.high[t] = std::min(plan.prefix[first + t], position + 1);
        for (int g = 0; g < group; g++) {
            const T* q = static_cast<const T*>(c.query) + (first + t) * c.query_token + (h * group + g) * c.query_head;
            std::transform(q, q + D, w.q.data() + size_t(t * group + g) * w.ld, as_factor<T>);
        }
    }
    accumulate(w, 0, tokens, group, cached_prompt<T>(plan, c, tile, h), after(first - 1), D, scale);
    for (int t = first; t < end; t++) {
        if (plan.own_begin[t] < 0) continue;
        w.low[t - first] = std::max(0, w.low[t - first] - plan.prefix[t]);
        w.high[t - first] = plan.positions[t] + 1 - plan.prefix[t];
        accumulate(w, t - first, 1, group, cached_own<T>(plan, c, t, h), after(t), D, scale);
    }
    for (int t = 0; t < tokens; t++)
        for (int g = 0; g < group; g++) {
            const int r = t * group + g;
            T* out = static_cast<T*>(c.out) + (size_t(first + t) * c.heads + h * group + g) * D;
            const A inverse = A(1) / w.total[r];
            for (int d = 0; d < D; d++) narrow(w.out[size_t(r) * D + d] * inverse, out + d);
        }
}

template <class T>
void attend(const Plan& plan, const Call& c) {
#pragma omp parallel num_threads(c.threads)
    {
#pragma omp for schedule(static)
        for (int t = 0; t < plan.tokens; t++) write_token<T>(plan, c, t);
#pragma omp for schedule(dynamic, 1)
        for (int unit = 0; unit < plan.tiles * c.kv_heads; unit++)
            attend_tile<T>(plan, c, unit);
    }
}

}  // namespace

#define ENTRIES(NAME, T) \
    void verl_attend_##NAME(const Plan* plan, const Call* call) { attend<T>(*plan, *call); }

extern "C" {
ENTRIES(bf16, bf16)
ENTRIES(fp32, float)
ENTRIES(fp64, double)
}
