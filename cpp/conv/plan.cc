/// \file
/// Which mechanism runs a convolution, and the contract's functions on it.
#include "conv/plan.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <utility>

#include "conv/eager.h"
#include "conv/problem.h"
#include "core/current_device.h"
#include "core/status.h"
#include "fused/plan.h"

namespace cutfuse {
namespace conv {
namespace {

Status no_memory() { return error(Code::kOutOfMemory, "no host memory for the plan"); }

/// A plan of nothing.
class EmptyPlan final : public MechanismPlan {
 public:
  EmptyPlan(const FusedConvProblem& problem, const DeviceProps& device)
      : problem_(problem), device_(device) {}

  const FusedConvProblem& problem() const noexcept override { return problem_; }
  const ConvPolicy& policy() const noexcept override { return policy_; }
  const DeviceProps& device() const noexcept override { return device_; }
  int64_t workspace_bytes() const noexcept override { return 0; }
  int64_t packed_bytes() const noexcept override { return 0; }
  std::string packed_key() const override { return "nothing"; }
  std::string describe() const override { return "nothing to do: the output is empty"; }
  Status pack(const ConstTensor4&, void*, void*) const noexcept override { return {}; }
  Status launch(const ConvBuffers&, void*) const noexcept override { return {}; }

 private:
  FusedConvProblem problem_;
  DeviceProps device_;
  ConvPolicy policy_;
};

struct Mechanism {
  Status (*expect)(const FusedConvProblem& problem, const DeviceProps& device, double* time);
  Status (*make_plan)(const FusedConvProblem& problem, const DeviceProps& device,
                      const ConvPolicy* forced, std::unique_ptr<MechanismPlan>* plan);
};
constexpr Mechanism kShift{shift::expect, shift::make_plan};
constexpr Mechanism kPointwise{pointwise::expect, pointwise::make_plan};
constexpr Mechanism kNchw{nchw::expect, nchw::make_plan};
constexpr Mechanism kPatches{patches::expect, patches::make_plan};
constexpr Mechanism kImplicit{implicit::expect, implicit::make_plan};
constexpr Mechanism kDirect{direct::expect, direct::make_plan};

/// The mechanism that takes the problem in the shortest time; if there is none, what the first
/// says.
Status select(const FusedConvProblem& problem, const DeviceProps& device,
              const Mechanism** mechanism, double* time) {
  Status reason;
  *mechanism = nullptr;
  *time = INFINITY;
  for (const Mechanism* one : {&kShift, &kPatches, &kPointwise, &kNchw, &kImplicit, &kDirect}) {
    double expected = 0.0;
    Status status = one->expect(problem, device, &expected);
    if (status.ok() && expected < *time) {
      *mechanism = one;
      *time = expected;
    }
    if (reason.ok()) reason = std::move(status);
  }
  return *mechanism == nullptr ? reason : Status{};
}

/// What every mechanism asks of a call.
Status check(const ConvPlan& plan, const ConvBuffers& buffers) noexcept {
  CUTFUSE_CHECK(
      buffers.x.data != nullptr && buffers.weight.data != nullptr && buffers.out != nullptr,
      Code::kInvalidValue, "x, weight and out must not be null");
  Status status = fused::check_memory("workspace", buffers.workspace, plan.workspace_bytes());
  if (status.ok() && plan.problem().packed_weight) {
    status = fused::check_memory("packed", buffers.packed, plan.packed_bytes());
  }
  if (!status.ok()) return status;
  return fused::check(plan.problem().tail, buffers.batch_norm);
}

const Mechanism* mechanism_of(const ConvPolicy& policy) {
  if (policy.tile_n != 0) return &kShift;
  if (policy.patch_n != 0) return &kPatches;
  if (policy.direct != Direct::kNone) return &kDirect;
  if (policy.gemm.source == Source::kNchw) return &kNchw;
  return policy.gemm.source == Source::kImages ? &kImplicit : &kPointwise;
}

}  // namespace

Status hand_on(const ConvBuffers& buffers, TurnedOperands* operands,
               FusedBuffers* linear) noexcept {
  const auto turn = [](const Operand* from, int32_t count, Operand* to) {
    std::transform(from, from + count, to, [](Operand operand) {
      std::swap(operand.row_stride, operand.col_stride);
      return operand;
    });
    return to;
  };
  const int32_t count = std::max(buffers.operand_count, buffers.after_operand_count);
  CUTFUSE_CHECK(count <= kMaxSteps, Code::kInvalidValue, "%d operands; a program has at most %d",
                count, kMaxSteps);
  linear->operands = turn(buffers.operands, buffers.operand_count, operands->program);
  linear->operand_count = buffers.operand_count;
  linear->after_operands =
      turn(buffers.after_operands, buffers.after_operand_count, operands->after);
  linear->after_operand_count = buffers.after_operand_count;
  linear->batch_norm = buffers.batch_norm;
  linear->promotion = buffers.promotion;
  return {};
}

}  // namespace conv

Status why_not(const FusedConvProblem& problem, const DeviceProps& device) noexcept try {
  if (Status status = conv::check_problem(problem, device); !status.ok()) return status;
  if (conv::is_empty(problem.conv)) return {};
  const conv::Mechanism* mechanism = nullptr;
  double time = 0.0;
  return conv::select(problem, device, &mechanism, &time);
} catch (const std::bad_alloc&) {
  return conv::no_memory();
}

Status why_slower(const FusedConvProblem& problem, const DeviceProps& device) noexcept try {
  if (!conv::check_problem(problem, device).ok() || conv::is_empty(problem.conv)) return {};
  const conv::Mechanism* mechanism = nullptr;
  double ours = 0.0;
  if (!conv::select(problem, device, &mechanism, &ours).ok()) return {};
  const double eager = conv::estimate_eager(problem);
  // PyTorch's is estimated from below, but what its launches take is known.
  const double margin = eager < 30.0 ? 1.0 : 1.08;
  CUTFUSE_CHECK(ours <= margin * eager, Code::kNotSupported,
                "%s: PyTorch is expected to be faster, no fewer than %.0f us against %.0f",
                to_string(problem.conv).c_str(), eager, ours);
  return {};
} catch (const std::bad_alloc&) {
  return conv::no_memory();
}

Status make_conv_plan(const FusedConvProblem& problem, const DeviceProps& device,
                      const ConvPolicy* forced, ConvPlan** plan) noexcept try {
  *plan = nullptr;
  if (Status status = conv::check_problem(problem, device); !status.ok()) return status;
  std::unique_ptr<conv::MechanismPlan> made;
  if (conv::is_empty(problem.conv)) {
    made = std::make_unique<conv::EmptyPlan>(problem, device);
  } else {
    const conv::Mechanism* mechanism = nullptr;
    if (forced != nullptr) {
      mechanism = conv::mechanism_of(*forced);
    } else {
      double time = 0.0;
      if (Status status = conv::select(problem, device, &mechanism, &time); !status.ok()) {
        return status;
      }
    }
    if (Status status = mechanism->make_plan(problem, device, forced, &made); !status.ok()) {
      return status;
    }
  }
  *plan = made.release();
  return {};
} catch (const std::bad_alloc&) {
  return conv::no_memory();
}

void destroy_conv_plan(ConvPlan* plan) noexcept { delete plan; }

Status pack(const ConvPlan& plan, const ConstTensor4& weight, void* packed, void* stream) noexcept {
  CUTFUSE_CHECK(
      weight.data != nullptr && packed != nullptr && reinterpret_cast<uintptr_t>(packed) % 256 == 0,
      Code::kInvalidValue, "weight must not be null and packed aligned to 256 bytes");
  CurrentDevice device;
  if (Status status = device.enter(plan.device().index); !status.ok()) return status;
  return static_cast<const conv::MechanismPlan&>(plan).pack(weight, packed, stream);
}

Status run(const ConvPlan& plan, const ConvBuffers& buffers, void* stream) noexcept {
  if (conv::is_empty(plan.problem().conv)) return {};
  if (Status status = conv::check(plan, buffers); !status.ok()) return status;
  CurrentDevice device;
  if (Status status = device.enter(plan.device().index); !status.ok()) return status;
  return static_cast<const conv::MechanismPlan&>(plan).launch(buffers, stream);
}

}  // namespace cutfuse
