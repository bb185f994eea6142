// Attention of one layer for models whose layers are torch's; see paged_attention.h.

#include "paged_attention.h"

namespace {

template <class T>
void attend(const Plan& plan, const Call& c) {
    const auto unit = [&](int index) -> Unit {
        const int tile = index / c.kv_heads;
        return {tile, index % c.kv_heads, plan.tile_start[tile], plan.tile_start[tile + 1]};
    };
    const int units = plan.tiles * c.kv_heads;
#pragma omp parallel num_threads(c.threads)
    {
#pragma omp for schedule(static)
        for (int t = 0; t < plan.tokens; t++)
            for (int h = 0; h < c.kv_heads; h++) write_token<T>(plan, c, t, h);
#pragma omp for schedule(dynamic, 1)
        for (int u = 0; u < units; u++) attend_tile<T>(plan, c, unit(u), unit(std::min(u + c.threads, units - 1)));
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
