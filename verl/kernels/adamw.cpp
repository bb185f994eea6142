// One AdamW step of a weight whose live tensor is bf16: see training/adamw.py, whose torch code computes the same.

#include "vectors.h"

namespace {

// A 32-bit hash of a 32-bit number (the finaliser of MurmurHash3).
inline U mixed(U x) {
    x ^= x >> 16;
    x *= 0x85ebca6bu;
    x ^= x >> 13;
    x *= 0xc2b2ae35u;
    return x ^ (x >> 16);
}

// x in bf16, rounded up with the probability of its distance from below: `noise` is uniform in [0, 2^16).
inline void store_dithered(bf16* p, F x, U noise) {
    H half = __builtin_convertvector(((U)x + noise) >> 16, H);
    std::memcpy(p, &half, sizeof half);
}

inline void store_moment(bf16* p, F x, U noise) { store_dithered(p, x, noise); }
inline void store_moment(float* p, F x, U) { store(p, x); }

struct AdamW {
    uint16_t* live;      // bf16 [count]
    int16_t* remainder;  // [count]: the master's bits less those of the live weight
    void *first, *second;
    const float* gradient;
    int64_t count;  // a multiple of the vector length
    uint32_t seed;
    float gradient_scale, beta1, beta2, step_size, second_scale, eps, decay;
    int threads;
};

template <class M>
void step(const AdamW& a) {
    constexpr int W = Lanes<float>::count;
    typedef int16_t S __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2)));
    M *first = (M*)a.first, *second = (M*)a.second;
    U lane;
    for (int i = 0; i < W; i++) lane[i] = i;
#pragma omp parallel for schedule(static) num_threads(team(a.count, a.threads))
    for (int64_t i = 0; i < a.count; i += W) {
        H live;
        S remainder;
        std::memcpy(&live, a.live + i, sizeof live);
        std::memcpy(&remainder, a.remainder + i, sizeof remainder);
        const U high = __builtin_convertvector(live, U) << 16;
        const F master = (F)(high + (U)__builtin_convertvector(remainder, I));
        const F g = load(a.gradient + i) * a.gradient_scale;
        const F m = load(first + i) * a.beta1 + g * (1.0f - a.beta1);
        const F v = load(second + i) * a.beta2 + g * g * (1.0f - a.beta2);
        F root;
        for (int j = 0; j < W; j++) root[j] = std::sqrt(v[j]);
        const F next = master * a.decay - a.step_size * m / (root * a.second_scale + a.eps);
        const U noise = mixed((U)(lane + uint32_t(i)) ^ a.seed);
        store_moment(first + i, m, noise & 0xffffu);
        store_moment(second + i, v, noise >> 16);
        const U bits = (U)next, nearest = (bits + 0x8000u) >> 16;  // halves away from zero: the rest fits into 16 bits
        live = __builtin_convertvector(nearest, H);
        remainder = __builtin_convertvector((I)(bits - (nearest << 16)), S);
        std::memcpy(a.live + i, &live, sizeof live);
        std::memcpy(a.remainder + i, &remainder, sizeof remainder);
    }
}

}  // namespace

extern "C" void verl_adamw_bf16(uint16_t* live, int16_t* remainder, void* first, void* second, const float* gradient,
                                int64_t count, int64_t seed, float gradient_scale, float beta1, float beta2,
                                float step_size, float second_scale, float eps, float decay, int64_t bf16_moments,
                                int threads) {
    const AdamW a{live, remainder, first, second, gradient, count, uint32_t(seed), gradient_scale, beta1, beta2,
                  step_size, second_scale, eps, decay, threads};
    bf16_moments ? step<bf16>(a) : step<float>(a);
}
