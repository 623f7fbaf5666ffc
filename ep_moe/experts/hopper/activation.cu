// Part of kernels: what follows a product's sums, by the name of the activation that is defined, if there is one.

__device__ __forceinline__ float activate(float gate, float up, float alpha, float limit) {
#if defined(SWIGLU)
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
#elif defined(GEGLU)
  return 0.5f * gate * (1.0f + erff(gate * 0.7071067811865476f)) * up;
#elif defined(SWIGLU_CLAMPED)
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up;
  up = up < -limit ? -limit : up;
  return (up + 1.0f) * __fdividef(gate, 1.0f + __expf(-alpha * gate));
#elif defined(RELU2)
  gate = gate < 0.0f ? 0.0f : gate;
  return gate * gate;
#else
  return gate;
#endif
}
