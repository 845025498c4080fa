// The norms: all that depends on the kind of norm. Included after memory-inl.h.
//
//     x_hat = (z - mean) / D        rstd = 1 / D        g = dy * weight
//     dz = rstd * (g - mean(g) - slope * mean(g * x_hat))
//
// A norm is a type, and the loops are compiled for each. Its mean, and mean(g), are 0 unless it is centred. A new norm is one more
// type here, in EACH_NORM; kCode is its number in src/addnorm/_util/norms.py.

// D = sqrt(mean(t^2) + eps), where t is z, less its mean if the norm is centred.
struct RootMeanSquare {
  static constexpr bool kIsNorm = true;

  // The term of each element, whose mean D is computed from; and a sum, increased by a term.
  template <class T>
  static INLINE T term(T t) {
    return t * t;
  }
  template <class T>
  static INLINE T add_term(T t, T sum) {
    return fma(t, t, sum);
  }
  static INLINE double rstd(double mean_term, double eps) { return 1.0 / __builtin_sqrt(mean_term + eps); }
  // The derivative of D by each element, times d.
  static INLINE vec slope(vec x_hat) { return x_hat; }
};

// kHasBias: whether torch's module has a bias, so that the usual gradients are those of weight and bias. `two_pass` computes the
// moments of a centred norm again, where those of one pass are not accurate: it requires that the terms are squares.
struct Layer : RootMeanSquare {
  static constexpr int kCode = 0;
  static constexpr bool kCentred = true, kHasBias = true;
};

struct Rms : RootMeanSquare {
  static constexpr int kCode = 1;
  static constexpr bool kCentred = false, kHasBias = false;
};

struct NoNorm {
  static constexpr int kCode = static_cast<int>(Norm::none);
  static constexpr bool kIsNorm = false, kCentred = false, kHasBias = false;
};

#define EACH_NORM(X) X(Layer) X(Rms) X(NoNorm)

#define AS_BIT(NORM) | 1u << NORM::kCode
constexpr uint32_t kNorms = 0 EACH_NORM(AS_BIT);
#undef AS_BIT

// Return use(NORM()) for the type of this norm, one of `kNorms`.
template <class Use>
auto with_norm(Norm norm, const Use& use) {
#define USE(NORM) \
  if (static_cast<int>(norm) == NORM::kCode) return use(NORM());
  EACH_NORM(USE)
#undef USE
  return use(NoNorm());
}
#undef EACH_NORM
