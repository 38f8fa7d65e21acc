#include <cmath>
#include <cstdint>
#include <cstring>
constexpr int D = 128;
extern "C" void gdn(const float* q, const float* k, const float* v, const float* state, const float* A_log,
                    const float* a, const float* dt_bias, const float* b, const int64_t* cu, float* out, float* ns,
                    float scale, int N, int T, int Hk, int Hv) {
    int R = Hv / Hk;
    for (int n = 0; n < N; n++)
        for (int h = 0; h < Hv; h++) {
            const float* S0 = state + ((size_t)n * Hv + h) * D * D;
            float* S = ns + ((size_t)n * Hv + h) * D * D;
            memcpy(S, S0, sizeof(float) * D * D);
            float A = std::exp(A_log[h]);
            for (int64_t t = cu[n]; t < cu[n + 1]; t++) {
                float x = a[t * Hv + h] + dt_bias[h];
                float sp = x > 20 ? x : std::log1p(std::exp(x));
                float g = std::exp(-A * sp);
                float beta = 1.f / (1.f + std::exp(-b[t * Hv + h]));
                const float* kk = k + (t * Hk + h / R) * D;
                const float* qq = q + (t * Hk + h / R) * D;
                const float* vv = v + (t * Hv + h) * D;
                float* oo = out + (t * Hv + h) * D;
                for (int i = 0; i < D; i++) {
                    float* r = S + i * D;
                    float ks = 0;
                    for (int j = 0; j < D; j++) ks += r[j] * kk[j];
                    float u = beta * (vv[i] - g * ks);
                    float qs = 0;
                    for (int j = 0; j < D; j++) { r[j] = g * r[j] + u * kk[j]; qs += r[j] * qq[j]; }
                    oo[i] = scale * qs;
                }
            }
        }
}
