// Attention of variable-length sequences over a paged KV cache: see rollout/attention.py, whose torch code gives the same
// result.
//
// Sequence n has queries [cu_seq_q[n], cu_seq_q[n + 1]), the last of its seqused_k[n] tokens, and its keys in the blocks
// of its row of block_table. The first shared[n] of these are read once for adjacent sequences that share them: a tile
// is a run of tokens of such sequences, or of one. All query heads of a tile that share a key/value head are multiplied
// with each of these blocks at once; then each token goes on, alone, over the rest. Softmax is online. A token's result
// does not depend on the others of its tile, bit for bit.
//
// Layout of one layer: keys [N, K, D / P, BLOCK, P], values [N, K, BLOCK / P, W, P]: the numbers of P rows side by side,
// as many as the processor multiplies at a time (two in bf16), and values filled up to W a row. So scores and mixed
// values are one kind of product: rows of factors (queries, or probabilities) times the rows of blocks.

#include "vectors.h"

#include <limits>
#include <vector>

namespace {

constexpr int BLOCK = 32;
constexpr int RUN = 8;  // blocks between two rescalings of the online softmax
constexpr int CHUNK = RUN * BLOCK;
constexpr int WIDTH = 16;  // values are filled up to a multiple of it

template <class T> using Factor = typename Operand<T>::Factor;

template <class T> Factor<T> as_factor(T x) {
    if constexpr (std::is_same_v<T, Factor<T>>) return x;
    else return widen(x);
}

// Blocks that follow on each other, by rows as far as factors go, and by columns. What lies at the same places of
// `ahead` is wanted next, in the second-level cache, as the first has no room for both: blocks are too short for the
// processor to see where the reading goes.
template <class T> struct Blocks {
    const T *const *at, *const *ahead;
    int rows, columns;  // of a block
};

// out[r] = sum over i < count of factors[r][i] * row i, for R rows of factors and C vectors of columns from `column`
// on. Each number is one sum over i in ascending order.
template <class T, int R, int C, class A>
void product_tile(const Factor<T>* factors, int ld, const Blocks<T>& blocks, int count, int column, A* out,
                  int out_ld) {
    using On = Operand<T>;
    constexpr int L = Lanes<A>::count, P = On::P;
    typename On::V sum[R][C] = {};
    for (int begin = 0, b = 0; begin < count; begin += blocks.rows, b++) {
        const T *rows[C], *ahead[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            const int j = column + c * L, block = b + j / blocks.columns, within = j % blocks.columns * P;
            rows[c] = blocks.at[block] + within;
            ahead[c] = blocks.ahead[block] + within;
        }
        const int end = std::min(begin + blocks.rows, count), stride = blocks.columns * P;
        const auto step = [&](int i, bool whole) {
            typename On::Row row[C];
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) {
                row[c] = On::read(rows[c] + (i - begin) / P * stride);
                __builtin_prefetch(ahead[c] + (i - begin) / P * stride, 0, 2);
                if (!whole) row[c] = On::first(row[c]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 8
                for (int c = 0; c < C; c++) sum[r][c] = On::add(sum[r][c], factors + r * ld + i, row[c]);
        };
        int i = begin;
        for (; i + P <= end; i += P) step(i, true);
        // Behind the last row there may be anything, and 0 x NaN is NaN.
        if (i < end) step(i, false);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) store(out + r * out_ld + column + c * L, sum[r][c]);
}

// The next `width` <= C vectors of columns.
template <class T, int R, int C, class A>
void strip(int width, const Factor<T>* factors, int ld, const Blocks<T>& blocks, int count, int column, A* out,
           int out_ld) {
    if (width == C) return product_tile<T, R, C>(factors, ld, blocks, count, column, out, out_ld);
    if constexpr (C > 1) strip<T, R, C - 1>(width, factors, ld, blocks, count, column, out, out_ld);
}

// For any number of rows and columns (a multiple of a vector's), by tiles that fit the registers.
template <class T, class A>
void product(int rows, const Factor<T>* factors, int ld, const Blocks<T>& blocks, int count, int columns, A* out,
             int out_ld) {
    constexpr int L = Lanes<A>::count, MOST = 6;
    const auto across = [&](auto height) {
        constexpr int R = decltype(height)::value, C = (R <= MOST / 2 ? 6 : 4) * REGISTERS / 32;
        // Tiles of about one width: a narrow one has too few sums to go on with while one is being added to.
        for (int done = 0, left = columns / L; left;) {
            const int tiles = (left + C - 1) / C, width = (left + tiles - 1) / tiles;
            strip<T, R, C>(width, factors, ld, blocks, count, done * L, out, out_ld);
            done += width;
            left -= width;
        }
    };
    for (; rows > 0; rows -= MOST, factors += MOST * ld, out += MOST * out_ld) switch (std::min(rows, MOST)) {
#define ROWS(R) \
        case R: across(std::integral_constant<int, R>()); break;
            ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#undef ROWS
        }
}

template <int N> constexpr int whole(int count) { return (count + N - 1) / N * N; }

// Where the keys and values of some tokens lie, of one head.
template <class T> struct Cached {
    const T *keys, *values;
    size_t key_stride, value_stride;  // from block to block
    const int32_t* blocks;
    int count;
    const T* key(int b) const { return keys + blocks[b] * key_stride; }
    const T* value(int b) const { return values + blocks[b] * value_stride; }
};

// What a tile is computed in: rows are tokens times the query heads of a key/value head.
template <class T> struct Workspace {
    using A = typename Accumulate<T>::type;
    int ld, width;  // of queries, and of values
    std::vector<Factor<T>> q, p;
    std::vector<A> scores, mixed, out, peak, total, keep;
    std::vector<int> low, high;
    void fit(int rows, int tokens, int D) {
        ld = whole<Operand<T>::P>(D);
        width = whole<WIDTH>(D);
        q.assign(size_t(rows) * ld, Factor<T>{});
        p.resize(size_t(rows) * CHUNK);
        scores.resize(size_t(rows) * CHUNK);
        mixed.resize(size_t(rows) * width);
        out.assign(size_t(rows) * width, A(0));
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
// when low <= j < high. `next` is read after.
template <class T, class A>
void accumulate(Workspace<T>& w, int first, int tokens, int group, const Cached<T>& here, const Cached<T>& next, int D,
                A scale) {
    int begin = std::numeric_limits<int>::max(), end = 0;
    for (int t = first; t < first + tokens; t++) {
        if (w.low[t] >= w.high[t]) continue;
        begin = std::min(begin, w.low[t]);
        end = std::max(end, w.high[t]);
    }
    const int rows = tokens * group, row = first * group, width = w.width;
    A* const out = w.out.data() + size_t(row) * width;
    // Chunks begin at multiples of CHUNK, so that a row's sums do not depend on the rows beside it.
    for (int chunk = begin / CHUNK * CHUNK; chunk < end; chunk += CHUNK) {
        const int start = std::max(chunk, begin / BLOCK * BLOCK), stop = std::min(chunk + CHUNK, end);
        const int blocks = whole<BLOCK>(stop - start) / BLOCK, seen = whole<WIDTH>(stop - start);
        const T *keys[RUN], *values[RUN], *keys_ahead[RUN], *values_ahead[RUN];
        for (int b = 0; b < blocks; b++) {
            keys[b] = here.key(start / BLOCK + b);
            values[b] = here.value(start / BLOCK + b);
            keys_ahead[b] = b < next.count ? next.key(b) : keys[b];
            values_ahead[b] = b < next.count ? next.value(b) : values[b];
        }
        product<T>(rows, w.q.data() + size_t(row) * w.ld, w.ld, {keys, keys_ahead, D, BLOCK}, D, seen,
                   w.scores.data(), CHUNK);
        for (int r = 0; r < rows; r++) {
            const int t = first + r / group;
            w.keep[r] = softmax(w.scores.data() + r * CHUNK, w.p.data() + r * CHUNK, seen, w.low[t] - start,
                                std::min(w.high[t], stop) - start, scale, w.peak[row + r], w.total[row + r]);
        }
        product<T>(rows, w.p.data(), CHUNK, {values, values_ahead, BLOCK, width}, stop - start, width,
                   w.mixed.data(), width);
        for (int r = 0; r < rows; r++)
            for (int d = r * width; d < (r + 1) * width; d++) out[d] = out[d] * w.keep[r] + w.mixed[d];
    }
}

struct Call {
    const void* query;
    void* out;  // contiguous
    const void *keys, *values;
    const int32_t *cu_seq_q, *seqused_k, *block_table, *shared;  // [N + 1], [N], [N, pages], [N]
    int64_t sequences, pages, query_token, query_head;           // strides in elements
    int heads, kv_heads, head_dim, window, threads;              // window 0: none
    double scale;
};

// Numbers of a block of keys, or of values.
template <class T> size_t key_block(int D) { return size_t(whole<Operand<T>::P>(D)) * BLOCK; }
template <class T> size_t value_block(int D) { return size_t(whole<WIDTH>(D)) * BLOCK; }

// A token of a step: its sequence and its position in it.
struct Token { int sequence, position; };
// A run of tokens whose first `shared` blocks are the same.
struct Tile { int first, end, shared; };

std::vector<Token> tokens_of(const Call& c) {
    std::vector<Token> tokens(c.cu_seq_q[c.sequences]);
    for (int n = 0; n < c.sequences; n++)
        for (int t = c.cu_seq_q[n]; t < c.cu_seq_q[n + 1]; t++)
            tokens[t] = {n, c.seqused_k[n] - c.cu_seq_q[n + 1] + t};
    return tokens;
}

// Tiles of at most TILE_ROWS rows of queries: enough to use a block well, few enough to divide the work.
std::vector<Tile> tiles_of(const Call& c) {
    constexpr int TILE_ROWS = 32;
    const int most = std::max(1, TILE_ROWS * c.kv_heads / c.heads);
    std::vector<Tile> tiles;
    for (int n = 0; n < c.sequences; n++) {
        const int32_t* row = c.block_table + n * c.pages;
        const bool joins = n && c.shared[n] == c.shared[n - 1] && std::equal(row, row + c.shared[n], row - c.pages);
        for (int t = c.cu_seq_q[n]; t < c.cu_seq_q[n + 1]; t++) {
            const bool first = t == c.cu_seq_q[n] && !joins;
            if (tiles.empty() || first || tiles.back().end - tiles.back().first == most)
                tiles.push_back({t, t, c.shared[n]});
            tiles.back().end = t + 1;
        }
    }
    return tiles;
}

// Blocks [begin, end) of a sequence, of one head.
template <class T>
Cached<T> cached(const Call& c, int sequence, int h, int begin, int end) {
    const size_t key_size = key_block<T>(c.head_dim), value_size = value_block<T>(c.head_dim);
    return {static_cast<const T*>(c.keys) + h * key_size, static_cast<const T*>(c.values) + h * value_size,
            c.kv_heads * key_size, c.kv_heads * value_size, c.block_table + sequence * c.pages + begin,
            std::max(0, end - begin)};
}

template <class T>
void attend_tile(const Call& c, const std::vector<Token>& all, const Tile& tile, int h) {
    using A = typename Accumulate<T>::type;
    static thread_local Workspace<T> w;
    const int D = c.head_dim, group = c.heads / c.kv_heads, shared = tile.shared * BLOCK;
    const int tokens = tile.end - tile.first;
    const Token* const token = all.data() + tile.first;
    const A scale = A(c.scale);
    w.fit(tokens * group, tokens, D);
    const auto lowest = [&](int t) { return c.window ? std::max(0, token[t].position + 1 - c.window) : 0; };
    const auto own = [&](int t) {
        return cached<T>(c, token[t].sequence, h, tile.shared, token[t].position / BLOCK + 1);
    };
    int last = 0;
    for (int t = 0; t < tokens; t++) {
        w.low[t] = lowest(t);
        w.high[t] = std::min(shared, token[t].position + 1);
        last = std::max(last, w.high[t]);
        for (int g = 0; g < group; g++) {
            const T* q = static_cast<const T*>(c.query) + (tile.first + t) * c.query_token + (h * group + g) * c.query_head;
            std::transform(q, q + D, w.q.data() + size_t(t * group + g) * w.ld, as_factor<T>);
        }
    }
    const Cached<T> common = cached<T>(c, token[0].sequence, h, 0, whole<BLOCK>(last) / BLOCK);
    accumulate(w, 0, tokens, group, common, own(0), D, scale);
    for (int t = 0; t < tokens; t++) {
        if (token[t].position < shared) continue;
        w.low[t] = std::max(0, lowest(t) - shared);
        w.high[t] = token[t].position + 1 - shared;
        accumulate(w, t, 1, group, own(t), own(std::min(t + 1, tokens - 1)), D, scale);
    }
    for (int t = 0; t < tokens; t++)
        for (int g = 0; g < group; g++) {
            const int r = t * group + g;
            T* out = static_cast<T*>(c.out) + (size_t(tile.first + t) * c.heads + h * group + g) * D;
            const A inverse = A(1) / w.total[r], *sum = w.out.data() + size_t(r) * w.width;
            int d = 0;
            for (; d + Lanes<A>::count <= D; d += Lanes<A>::count) store(out + d, load(sum + d) * inverse);
            for (; d < D; d++) narrow(sum[d] * inverse, out + d);
        }
}

template <class T>
void attend(const Call& c) {
    const std::vector<Token> tokens = tokens_of(c);
    const std::vector<Tile> tiles = tiles_of(c);
    const int units = int(tiles.size()) * c.kv_heads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(c.threads)
    for (int u = 0; u < units; u++) attend_tile<T>(c, tokens, tiles[u / c.kv_heads], u % c.kv_heads);
}

// Keys and values of tokens [tokens, heads, D] into their slots of the cache.
template <class T>
void write(const T* key, const T* value, T* keys, T* values, const int64_t* slots, int64_t tokens, int64_t key_token,
           int64_t key_head, int64_t value_token, int64_t value_head, int64_t heads, int64_t D, int threads) {
    constexpr int P = Operand<T>::P;
    const int64_t width = whole<WIDTH>(int(D));
#pragma omp parallel for schedule(static) num_threads(team(tokens * heads * D, threads))
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++) {
            const int64_t block = slots[t] / BLOCK * heads + h, row = slots[t] % BLOCK;
            const T *k = key + t * key_token + h * key_head, *v = value + t * value_token + h * value_head;
            T* to = keys + block * key_block<T>(int(D)) + row * P;
            for (int64_t d = 0; d < D; d++) to[d / P * P * BLOCK + d % P] = k[d];
            to = values + block * value_block<T>(int(D)) + row / P * P * width + row % P;
            for (int64_t d = 0; d < D; d++) to[d * P] = v[d];
        }
}

}  // namespace

#define ENTRIES(NAME, T)                                                                                              \
    void verl_write_##NAME(const T* key, const T* value, T* keys, T* values, const int64_t* slots, int64_t tokens,    \
                           int64_t key_token, int64_t key_head, int64_t value_token, int64_t value_head,              \
                           int64_t heads, int64_t head_dim, int threads) {                                            \
        write(key, value, keys, values, slots, tokens, key_token, key_head, value_token, value_head, heads, head_dim, \
              threads);                                                                                               \
    }                                                                                                                 \
    void verl_varlen_attn_##NAME(const void* query, void* out, const void* keys, const void* values,                  \
                                 const int32_t* cu_seq_q, const int32_t* seqused_k, const int32_t* block_table,       \
                                 const int32_t* shared, int64_t sequences, int64_t pages, int64_t query_token,        \
                                 int64_t query_head, int64_t heads, int64_t kv_heads, int64_t head_dim,               \
                                 int64_t window, double scale, int threads) {                                         \
        attend<T>({query, out, keys, values, cu_seq_q, seqused_k, block_table, shared, sequences, pages, query_token, \
                   query_head, int(heads), int(kv_heads), int(head_dim), int(window), threads, scale});               \
    }

extern "C" {
ENTRIES(bf16, bf16)
ENTRIES(fp32, float)
ENTRIES(fp64, double)
}
