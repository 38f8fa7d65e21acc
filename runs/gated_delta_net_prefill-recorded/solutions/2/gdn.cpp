// Each task: one sequence x one value head; the two cores take tasks from a list, longest first.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#include <omp.h>
constexpr int D = 128;
extern "C" void gdn(const float* q, const float* k, const float* v, const float* state, const float* A_log,
                    const float* a, const float* dt_bias, const float* b, const int64_t* cu, float* out, float* ns,
                    float scale, int N, int T, int Hk, int Hv) {
    int R = Hv / Hk;
    std::vector<int> order(N);
    for (int i = 0; i < N; i++) order[i] = i;
    std::sort(order.begin(), order.end(), [&](int x, int y) { return cu[x + 1] - cu[x] > cu[y + 1] - cu[y]; });
    #pragma omp parallel for schedule(dynamic, 1)
    for (int task = 0; task < N * Hv; task++) {
        int n = order[task / Hv], h = task % Hv;
        const float* S0 = state + ((size_t)n * Hv + h) * D * D;
        float* S = ns + ((size_t)n * Hv + h) * D * D;
        float A = std::exp(A_log[h]);
        int L = cu[n + 1] - cu[n];
        static thread_local std::vector<float> gb;
        gb.resize(2 * L);
        for (int i = 0; i < L; i++) {
            int64_t t = cu[n] + i;
            float x = a[t * Hv + h] + dt_bias[h];
            float sp = x > 20 ? x : std::log1p(std::exp(x));
            gb[2 * i] = std::exp(-A * sp);
            gb[2 * i + 1] = 1.f / (1.f + std::exp(-b[t * Hv + h]));
        }
        constexpr int RB = 32;  // 32 rows of the state: 16 KiB, stays in L1 over all tokens
        for (int r0 = 0; r0 < D; r0 += RB) {
            memcpy(S + r0 * D, S0 + r0 * D, sizeof(float) * RB * D);
            for (int i = 0; i < L; i++) {
                int64_t t = cu[n] + i;
                float g = gb[2 * i], beta = gb[2 * i + 1];
                const float* kk = k + (t * Hk + h / R) * D;
                const float* qq = q + (t * Hk + h / R) * D;
                const float* vv = v + (t * Hv + h) * D;
                float* oo = out + (t * Hv + h) * D;
                for (int row = r0; row < r0 + RB; row++) {
                    float* __restrict r = S + row * D;
                    float ks = 0;
                    for (int j = 0; j < D; j++) ks += r[j] * kk[j];
                    float u = beta * (vv[row] - g * ks);
                    float qs = 0;
                    for (int j = 0; j < D; j++) { float x = g * r[j] + u * kk[j]; r[j] = x; qs += x * qq[j]; }
                    oo[row] = scale * qs;
                }
            }
        }
    }
}
