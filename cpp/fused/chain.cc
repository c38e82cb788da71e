/// \file
/// Two contractions as one plan: the first stores what the second multiplies.
#include <new>

#include "core/current_device.h"
#include "core/status.h"
#include "fused/plan.h"

namespace cutfuse {
namespace fused {
namespace {

/// fp32 results between the contractions must fit planes of one exponent.
bool is_bounded(const Program& program) {
  if (program.count == 0) {
    return false;
  }
  const Op last = program.steps[program.count - 1].op;
  return last == Op::kSigmoid || last == Op::kTanh;
}

class TwoPlans final : public ChainPlan {
 public:
  int64_t workspace_bytes() const noexcept override { return arena_.size(); }
  std::string describe() const override {
    return second_->describe_preparation() + first_->describe() + "\n" +
           second_->describe_product();
  }

  Status make(const ChainProblem& problem, const DeviceProps& device) {
    const bool wide = problem.first.gemm.dtype == DType::kFloat32;
    Status status = fused::make(problem.first, device, nullptr, {false, wide}, &first_);
    if (status.ok()) {
      // Here small products were not measured.
      const Links links{wide, false};
      const GemmPolicy policy = select_large_policy(problem.second, links, device);
      status = fused::make(problem.second, device, &policy, links, &second_);
    }
    if (!status.ok()) return status;
    const int32_t planes = wide ? plane_count(problem.first.gemm) : 1;
    PlanesLayout layout;
    status = planes_layout(problem.first.gemm.m, problem.first.gemm.n, planes, &layout);
    if (!status.ok()) return status;
    CUTFUSE_CHECK(arena_.add(layout.plane_bytes, &between_) &&
                      arena_.add(first_->workspace_bytes(), &first_workspace_) &&
                      arena_.add(second_->workspace_bytes(), &second_workspace_),
                  Code::kInvalidValue, "the workspace of %s needs more than 2^63 bytes",
                  to_string(problem.first.gemm).c_str());
    return {};
  }

  Status launch(const ChainBuffers& buffers, void* stream) const noexcept {
    if (Status status = check_memory("workspace", buffers.workspace, arena_.size()); !status.ok()) {
      return status;
    }
    CurrentDevice device;
    if (Status status = device.enter(first_->device().index); !status.ok()) return status;
    auto* base = static_cast<char*>(buffers.workspace);
    void* between = base + between_;
    FusedBuffers first = buffers.first;
    FusedBuffers second = buffers.second;
    first.workspace = base + first_workspace_;
    second.workspace = base + second_workspace_;
    const GemmProblem& gemm = first_->problem().gemm;
    if (gemm.dtype != DType::kFloat32) {
      const int64_t leading = (gemm.n + 7) / 8 * 8;
      first.out = {between, leading, gemm.dtype};
      second.x = {between, leading, 1, gemm.dtype};
    }
    // The second weight is split while memory is busy anyway, and not between two contractions.
    const FusedPlan& last = second_->running(second);
    Prepared prepared;
    if (Status status = last.prepare(second, Linked{between}, &prepared, stream); !status.ok()) {
      return status;
    }
    if (Status status = first_->launch(first, Linked{nullptr, nullptr, between}, stream);
        !status.ok()) {
      return status;
    }
    prepared.call.follows_fold = false;  // but the first contraction
    return last.multiply(second, &prepared, stream);
  }

 private:
  std::unique_ptr<FusedPlan> first_, second_;
  Arena arena_;
  int64_t between_ = 0, first_workspace_ = 0, second_workspace_ = 0;
};

}  // namespace
}  // namespace fused

Status why_not(const ChainProblem& problem, const DeviceProps& device) noexcept try {
  const auto& [first, second] = problem;
  if (Status status = fused::why_not_linked(first, device); !status.ok()) return status;
  if (Status status = fused::why_not_linked(second, device); !status.ok()) return status;
  CUTFUSE_CHECK(first.tail == Tail::kNone, Code::kInvalidValue,
                "a chain's first contraction has tail %d; it must have none",
                static_cast<int>(first.tail));
  CUTFUSE_CHECK(first.gemm.m == second.gemm.m && first.gemm.n == second.gemm.k &&
                    first.gemm.dtype == second.gemm.dtype &&
                    first.gemm.precision == second.gemm.precision && second.x_leading == 0,
                Code::kInvalidShape,
                "a chain of %s and %s: the result of the first must be the "
                "second's x",
                to_string(first.gemm).c_str(), to_string(second.gemm).c_str());
  CUTFUSE_CHECK(first.gemm.dtype != DType::kFloat32 || fused::is_bounded(first.program),
                Code::kNotSupported,
                "between two contractions: %s; the program must end in sigmoid or tanh, whose "
                "values fit planes of one exponent",
                to_string(first.program).c_str());
  return {};
} catch (const std::bad_alloc&) {
  return error(Code::kOutOfMemory, "no host memory to say why");
}

Status make_chain(const ChainProblem& problem, const DeviceProps& device,
                  ChainPlan** plan) noexcept {
  *plan = nullptr;
  if (Status status = why_not(problem, device); !status.ok()) return status;
  try {
    auto made = std::make_unique<fused::TwoPlans>();
    if (Status status = made->make(problem, device); !status.ok()) return status;
    *plan = made.release();
  } catch (const std::bad_alloc&) {
    return error(Code::kOutOfMemory, "no host memory for the plan");
  }
  return {};
}

void destroy_chain(ChainPlan* plan) noexcept { delete plan; }

Status run(const ChainPlan& plan, const ChainBuffers& buffers, void* stream) noexcept {
  return static_cast<const fused::TwoPlans&>(plan).launch(buffers, stream);
}

}  // namespace cutfuse
