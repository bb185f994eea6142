// Vectors of the compiler's, so any processor will do, in fp32 for bf16 values in memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#include <type_traits>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

// The processor's own vectors: the compiler keeps wider ones in memory.
#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int VECTOR_BYTES = 16, REGISTERS = 32;
#else
constexpr int VECTOR_BYTES = 16, REGISTERS = 16;
#endif

struct bf16 { uint16_t bits; };

template <class T> struct Accumulate { using type = T; };
template <> struct Accumulate<bf16> { using type = float; };

template <class A> struct Lanes {
    static constexpr int count = VECTOR_BYTES / sizeof(A);
    // Read and written as a whole where it lies: copied, it might go in halves through memory.
    typedef A type __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
};
using F = Lanes<float>::type;
typedef uint32_t U __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef int32_t I __attribute__((vector_size(VECTOR_BYTES), aligned(4)));
typedef uint16_t H __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2)));

inline F load(const bf16* p) {
    H half;
    std::memcpy(&half, p, sizeof half);
    return (F)(__builtin_convertvector(half, U) << 16);
}
inline F load(const float* p) { return *reinterpret_cast<const F*>(p); }
inline Lanes<double>::type load(const double* p) { return *reinterpret_cast<const Lanes<double>::type*>(p); }
template <class V, class A> inline void store(A* p, V v) { *reinterpret_cast<V*>(p) = v; }
inline void store(bf16* p, F v) {
#if defined(__AVX512BF16__)
    const __m256bh half = _mm512_cvtneps_pbh((__m512)v);
#else
    U bits = (U)v;
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const H half = __builtin_convertvector(bits, H);
#endif
    std::memcpy(p, &half, sizeof half);
}

// x rounded to the precision of T.
template <class T> inline F rounded(F x) { return x; }
template <> inline F rounded<bf16>(F x) {
    U bits = (U)x;
    return (F)((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u);
}

inline float widen(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
inline float widen(float x) { return x; }
inline double widen(double x) { return x; }

inline void narrow(float x, bf16* out) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    out->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void narrow(float x, float* out) { *out = x; }
inline void narrow(double x, double* out) { *out = x; }

// How rows of T are multiplied with factors: P at a time, their numbers side by side, and one vector of columns.
template <class T> struct Operand {
    static constexpr int P = 1;
    using Factor = T;
    using V = typename Lanes<T>::type;
    using Row = V;
    static Row read(const T* p) { return load(p); }
    static Row first(Row row) { return row; }
    static V add(V sum, const Factor* factor, Row row) { return sum + *factor * row; }
};
template <> struct Operand<bf16> {
    static constexpr int P = 2;
    using V = F;
#if defined(__AVX512BF16__)
    using Factor = bf16;
    using Row = __m512i;
    static Row read(const bf16* p) { return _mm512_loadu_si512(p); }
    static Row first(Row row) { return _mm512_and_si512(row, _mm512_set1_epi32(0xffff)); }
    static V add(V sum, const Factor* factor, Row row) {
        int32_t pair;
        std::memcpy(&pair, factor, sizeof pair);
        return (V)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)row);
    }
#else
    using Factor = float;
    struct Row { F first, second; };
    static Row read(const bf16* p) {
        const U both = *reinterpret_cast<const U*>(p);
        return {(F)(both << 16), (F)(both & 0xffff0000u)};
    }
    static Row first(Row row) { return {row.first, F{}}; }
    static V add(V sum, const Factor* factor, Row row) { return sum + factor[0] * row.first + factor[1] * row.second; }
#endif
};

// The largest of x[0:count] and `top`, count a multiple of the vector length.
template <class T, class V>
V largest(const T* x, int64_t count, V top) {
    for (int64_t i = 0; i < count; i += int64_t(sizeof(V) / sizeof(top[0]))) {
        const V v = load(x + i);
        top = v > top ? v : top;
    }
    return top;
}

// A vector's numbers reduced by halves.
template <class V, class Combine> auto reduce(V v, Combine combine) {
    using A = std::decay_t<decltype(v[0])>;
    if constexpr (sizeof(V) == 2 * sizeof(A)) return combine(v[0], v[1]);
    else {
        typedef A Half __attribute__((vector_size(sizeof(V) / 2)));
        Half halves[2];
        std::memcpy(halves, &v, sizeof v);
        return reduce(Half(combine(halves[0], halves[1])), combine);
    }
}
template <class V> auto reduce_max(V v) {
    return reduce(v, [](auto a, auto b) { return a > b ? a : b; });
}
template <class V> auto reduce_sum(V v) {
    return reduce(v, [](auto a, auto b) { return a + b; });
}

// exp(x) for x <= 0: 2^n times a polynomial of the rest (relative error 2e-7); 0 below the smallest normal number.
inline F exp_vector(F x) {
    const F lowest = F{} - 87.0f;
    const I tiny = x < lowest;
    x = tiny ? lowest : x;
    const F shift = F{} + 12582912.0f;  // 1.5 * 2^23: a number added to it is rounded to a whole one, in the last bits
    const F shifted = x * 1.44269504f + shift, whole = shifted - shift;
    F r = x - whole * 0.693359375f;
    r = r + whole * 2.12194440e-4f;
    F p = F{} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const F power = (F)(((I)shifted << 23) + 0x3f800000);
    return tiny ? F{} : p * power;
}
inline F silu(F x) {
    const F e = exp_vector(x > 0 ? -x : x);
    return (x > 0 ? x : x * e) / (e + 1.0f);
}
inline Lanes<double>::type exp_vector(Lanes<double>::type x) {
    for (int i = 0; i < Lanes<double>::count; i++) x[i] = std::exp(x[i]);
    return x;
}

// A team of threads costs some microseconds: not more of them than there is work for.
inline int team(int64_t elements, int threads) { return int(std::min<int64_t>(threads, 1 + elements / (1 << 15))); }

}  // namespace
