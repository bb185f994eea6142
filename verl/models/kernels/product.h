// Linear maps of some tokens: out = x w^T + bias for x [tokens, K], w [N, K], with sums in fp32.
//
// Tokens are the lanes of a vector (below, of sixteen): x is laid out so once, and the weights are read where they lie,
// each number (in bf16 each pair of them) multiplied with all tokens. Every number of out is one sum over k in ascending
// order, so that a token's result does not depend, bit for bit, on the other tokens, nor on who computes which part.
//
// Layout of x ("packed"): two groups of sixteen tokens side by side, [groups / 2][K / P][2][16][P], and an odd last group
// [K / P][1][16][P]; P numbers fill a word of 32 bits.

#pragma once

#include "vectors.h"

#include <cstdlib>
#include <memory>

namespace {

constexpr int GROUP = Lanes<float>::count;        // tokens in a vector
constexpr int SIDE = 2;                           // groups side by side: with so many rows of
constexpr int HEIGHT = REGISTERS == 32 ? 12 : 4;  // weights as many sums as the registers hold
constexpr int TILES = 4;                          // of such rows in a panel

template <class T> constexpr int PER_WORD = sizeof(uint32_t) / sizeof(T);

struct Free {
    void operator()(void* p) const { std::free(p); }
};
// Room for packed tokens, or whatever else shall begin where a vector does.
using Space = std::unique_ptr<uint32_t, Free>;
inline Space space(size_t words) {
    const size_t bytes = (words * sizeof(uint32_t) + VECTOR_BYTES - 1) / VECTOR_BYTES * VECTOR_BYTES;
    return Space(static_cast<uint32_t*>(std::aligned_alloc(VECTOR_BYTES, bytes)));
}

// Where group g of `groups` begins, with `stride` words from one to the next k.
struct Place { uint32_t* at; int stride; };
template <class T>
Place place(uint32_t* packed, int g, int groups, int64_t K) {
    const int first = g / SIDE * SIDE, side = std::min(SIDE, groups - first);
    return {packed + (first * (K / PER_WORD<T>) + (g - first)) * GROUP, side * GROUP};
}

// A group's [tokens, K] into its place; K a multiple of 16. Lanes behind the last token repeat it.
template <class T>
void pack(const T* x, int64_t K, int tokens, Place to) {
    constexpr int P = PER_WORD<T>;
    const T* row[GROUP];
    for (int c = 0; c < GROUP; c++) row[c] = x + std::min(c, tokens - 1) * K;
    for (int64_t k = 0; k < K / P; k += 4) {
#if defined(__AVX512F__)
        // a[i] holds four words of each of the tokens i, i + 4, i + 8, i + 12: transposed in fours.
        __m512i a[4], b[4];
        for (int i = 0; i < 4; i++) {
            const auto four = [&](int c) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row[c] + k * P)); };
            a[i] = _mm512_castsi128_si512(four(i));
            a[i] = _mm512_mask_broadcast_i32x4(a[i], 0x00f0, four(i + 4));
            a[i] = _mm512_mask_broadcast_i32x4(a[i], 0x0f00, four(i + 8));
            a[i] = _mm512_mask_broadcast_i32x4(a[i], 0xf000, four(i + 12));
        }
        for (int i = 0; i < 2; i++) {
            b[i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
            b[i + 2] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
        }
        for (int i = 0; i < 2; i++) {
            _mm512_storeu_si512(to.at + (k + 2 * i) * to.stride, _mm512_unpacklo_epi64(b[2 * i], b[2 * i + 1]));
            _mm512_storeu_si512(to.at + (k + 2 * i + 1) * to.stride, _mm512_unpackhi_epi64(b[2 * i], b[2 * i + 1]));
        }
#else
        for (int w = 0; w < 4; w++)
            for (int c = 0; c < GROUP; c++)
                std::memcpy(to.at + (k + w) * to.stride + c, row[c] + (k + w) * P, sizeof(uint32_t));
#endif
    }
}

// What a thread has to do beside a product: between two tiles `pause(most)` does some of it, and says which pieces of
// memory it is going to read, `most` of them or fewer. They are asked for while the next tile is multiplied.
struct Pieces { const char* const* at = nullptr; int count = 0; };
struct Nothing {
    Pieces pause(int) const { return {}; }
};

// R rows of weights times C groups of tokens. Row r < R / 2 lies at w[0] + r K, row R / 2 + r at w[1] + r K; what lies
// from `ahead` on likewise is wanted next. A function of its own: else the compiler keeps sums in memory.
template <class T, int R, int C, class Other>
[[gnu::noinline]] void sums(const T* const (&w)[2], const T* const (&ahead)[2], int64_t K, const uint32_t* x,
                            Other& other, F (&out)[R][C]) {
    using On = Operand<T>;
    constexpr int P = On::P, HALF = R / 2, LINE = CACHE_LINE / sizeof(T);
    const Pieces wanted = other.pause(int(K / (2 * P) / (PIECE / CACHE_LINE)));
    F sum[R][C];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int c = 0; c < C; c++) sum[r][c] = F{};
    const T *low = w[0], *high = w[1], *next_low = ahead[0], *next_high = ahead[1];
    const auto step = [&](const T*& next) {
        __builtin_prefetch(next, 0, 2);
        next += LINE;
        typename On::Row row[C];
#pragma GCC unroll 2
        for (int c = 0; c < C; c++) row[c] = On::read(reinterpret_cast<const T*>(x + c * GROUP));
#pragma GCC unroll 12
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int c = 0; c < C; c++) sum[r][c] = On::add(sum[r][c], (r < HALF ? low : high) + r % HALF * K, row[c]);
        x += C * GROUP;
        low += P;
        high += P;
    };
    int64_t k = 0;
    for (int i = 0; i < wanted.count; i++)
        for (int at = 0; at < PIECE; at += CACHE_LINE, k += 2 * P) {
            __builtin_prefetch(wanted.at[i] + at, 0, 2);
            step(next_low);
            step(next_high);
        }
    for (; k < K; k += 2 * P) {
        step(next_low);
        step(next_high);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int c = 0; c < C; c++) out[r][c] = sum[r][c];
}

// Columns of out for a group: `lane` of column[r] is out[lane][r], for the first `tokens` lanes.
template <class T, int R>
inline void put(const F (&column)[R], T* out, int64_t ld, int tokens) {
    constexpr int P = PER_WORD<T>, WORDS = R / P;
    U word[(WORDS + 3) / 4 * 4] = {};
#pragma GCC unroll 12
    for (int i = 0; i < WORDS; i++) {
        if constexpr (P == 1) word[i] = (U)column[i];
        else word[i] = paired(column[2 * i], column[2 * i + 1]);
    }
#pragma GCC unroll 3
    for (int i = 0; i < WORDS; i += 4) {
        alignas(VECTOR_BYTES) uint32_t four[GROUP][4];
#if defined(__AVX512F__)
        const auto lo = [](U a, U b) { return _mm512_unpacklo_epi32((__m512i)a, (__m512i)b); };
        const auto hi = [](U a, U b) { return _mm512_unpackhi_epi32((__m512i)a, (__m512i)b); };
        const __m512i a = lo(word[i], word[i + 1]), b = lo(word[i + 2], word[i + 3]);
        const __m512i c = hi(word[i], word[i + 1]), d = hi(word[i + 2], word[i + 3]);
        const __m512i turned[4] = {_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b),
                                   _mm512_unpacklo_epi64(c, d), _mm512_unpackhi_epi64(c, d)};
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            _mm_store_si128((__m128i*)four[j], _mm512_castsi512_si128(turned[j]));
            _mm_store_si128((__m128i*)four[j + 4], _mm512_extracti32x4_epi32(turned[j], 1));
            _mm_store_si128((__m128i*)four[j + 8], _mm512_extracti32x4_epi32(turned[j], 2));
            _mm_store_si128((__m128i*)four[j + 12], _mm512_extracti32x4_epi32(turned[j], 3));
        }
#else
        for (int j = 0; j < 4; j++)
            for (int t = 0; t < GROUP; t++) four[t][j] = word[i + j][t];
#endif
        const size_t bytes = sizeof(uint32_t) * std::min(4, WORDS - i);
        for (int t = 0; t < tokens; t++) std::memcpy(out + t * ld + i * P, four[t], bytes);
    }
}

// A map's weights [N, K] and bias [N] or null.
template <class T> struct Weights { const T *w, *bias; };

// The part of a product that one of `parts` threads computes: tiles of rows of weights, over all tokens.
template <class T> struct Job {
    const uint32_t* x;  // packed
    int tokens;
    int64_t K, N;
    int part, parts;
    int groups() const { return (tokens + GROUP - 1) / GROUP; }
};

// visit(width, group) for the groups of tokens, two side by side as long as there are.
template <class Visit>
void over_groups(int groups, Visit visit) {
    int g = 0;
    for (; g + SIDE <= groups; g += SIDE) visit(std::integral_constant<int, SIDE>(), g);
    if (g < groups) visit(std::integral_constant<int, 1>(), g);
}

// visit(height, n) for rows of weights [n, n + height) in [begin, end): STEP of them at a time, what is left by LEAST.
template <int STEP, int LEAST, class Visit>
void over_rows(int64_t begin, int64_t end, Visit visit) {
    int64_t n = begin;
    for (; n + STEP <= end; n += STEP) visit(std::integral_constant<int, STEP>(), n);
    for (; n < end; n += LEAST) visit(std::integral_constant<int, LEAST>(), n);
}

// visit(height, n, width, group) for the tiles of a part; N is divided at multiples of STEP. A panel of some tiles is
// gone through for two groups of tokens before the next two: these stay in the first cache, and so does what they give.
template <int STEP, int LEAST, class Visit>
void over_tiles(int64_t N, int part, int parts, int groups, Visit visit) {
    constexpr int64_t PANEL = TILES * STEP;
    const int64_t steps = N / STEP, begin = steps * part / parts * STEP;
    const int64_t end = part + 1 < parts ? steps * (part + 1) / parts * STEP : N;
    for (int64_t n = begin; n < end; n += PANEL)
        over_groups(groups, [&](auto width, int g) {
            over_rows<STEP, LEAST>(n, std::min(n + PANEL, end),
                                   [&](auto height, int64_t n) { visit(height, n, width, g); });
        });
}

// out [tokens, N] with `ld` from token to token.
template <class T, class Other>
void product(const Job<T>& job, const Weights<T>& map, T* out, int64_t ld, Other& other) {
    const int64_t K = job.K;
    over_tiles<HEIGHT, 4>(job.N, job.part, job.parts, job.groups(), [&](auto height, int64_t n, auto width, int g) {
        constexpr int R = decltype(height)::value, C = decltype(width)::value;
        const T* const w[2] = {map.w + n * K, map.w + (n + R / 2) * K};
        const int64_t after = g ? n : std::min(n + TILES * HEIGHT, job.N - R);
        const T* const ahead[2] = {map.w + after * K, map.w + (after + R / 2) * K};
        F sum[R][C];
        sums<T, R, C>(w, ahead, K, job.x + g * (K / PER_WORD<T>) * GROUP, other, sum);
#pragma GCC unroll 2
        for (int c = 0; c < C; c++) {
            F column[R];
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) column[r] = map.bias ? sum[r][c] + widen(map.bias[n + r]) : sum[r][c];
            const int first = (g + c) * GROUP;
            put<T, R>(column, out + first * ld + n, ld, std::min(GROUP, job.tokens - first));
        }
    });
}

// silu of the gate's map times the other's, packed [tokens, N].
template <class T, class Other>
void gated_product(const Job<T>& job, const Weights<T>& gate, const Weights<T>& up, uint32_t* out, Other& other) {
    constexpr int P = PER_WORD<T>;
    const int64_t K = job.K;
    over_tiles<HEIGHT / 2, 2>(job.N, job.part, job.parts, job.groups(), [&](auto height, int64_t n, auto width, int g) {
        constexpr int R = decltype(height)::value, C = decltype(width)::value;
        const T* const w[2] = {gate.w + n * K, up.w + n * K};
        const int64_t after = g ? n : std::min(n + TILES * HEIGHT / 2, job.N - R);
        const T* const ahead[2] = {gate.w + after * K, up.w + after * K};
        F sum[2 * R][C];
        sums<T, 2 * R, C>(w, ahead, K, job.x + g * (K / P) * GROUP, other, sum);
        uint32_t* to = out + (g * (job.N / P) + n / P * C) * GROUP;
#pragma GCC unroll 2
        for (int c = 0; c < C; c++) {
            F value[R];
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                F a = sum[r][c], b = sum[R + r][c];
                if (gate.bias) a += widen(gate.bias[n + r]);
                if (up.bias) b += widen(up.bias[n + r]);
                value[r] = rounded<T>(silu(rounded<T>(a))) * rounded<T>(b);
            }
#pragma GCC unroll 6
            for (int r = 0; r < R; r += P) {
                U word;
                if constexpr (P == 1) word = (U)value[r];
                else word = paired(value[r], value[r + 1]);
                store(to + (r / P * C + c) * GROUP, word);
            }
        }
    });
}

}  // namespace
