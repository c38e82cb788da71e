/// \file
/// FusedProblem x DeviceProps -> stages and one workspace arena; launch() runs them in order.
#include "fused/plan.h"

#include <new>
#include <utility>

#include "batch_norm/kernels.h"
#include "core/current_device.h"
#include "core/status.h"
#include "cutfuse/row_reduce.h"
#include "device/logsumexp.h"
#include "gemm/limits.h"
#include "program/apply.h"
#include "program/row_limits.h"
#include "row_reduce/kernels.h"
#include "simt/multiply.h"
#include "skinny/multiply.h"
#include "split/trailing.h"

namespace cutfuse {
namespace fused {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

int64_t FusedPlan::partial_count() const {
  return reduces_rows() ? ceil_div(problem_.gemm.n, tile_features())
                        : ceil_div(problem_.gemm.m, partial_rows());
}

int32_t FusedPlan::exchange_counts() const {
  if (exchanging_blocks_ == 0) return 0;
  const int64_t tiles = turned()
                            ? gemm::padded_tile_rows(multiplied(problem_.gemm, policy_), policy_)
                            : ceil_div(problem_.gemm.n, policy_.tile_n);
  return static_cast<int32_t>(tiles);
}

bool FusedPlan::folds_ahead() const {
  // The program runs afterwards, or in tiles that fold nothing.
  if (splits_k() || simt()) return false;
  if (exchanging_blocks_ != 0 && !splits_x()) return true;  // which also clears the arrivals
  const auto [m, n, k, precision, dtype] = problem_.gemm;
  const Program& program = problem_.program;
  const bool affine = program.count > 0 ? gemm::is_affine(program.steps[0].op) : normalises();
  const bool many = ceil_div(m, policy_.tile_m) * ceil_div(n, policy_.tile_n) > device_.sm_count;
  return affine && (many || normalises() || turned());
}

Status FusedPlan::lay_out() {
  if (empty()) {
    return {};
  }
  const auto [m, n, k, precision, dtype] = problem_.gemm;
  bool fits = true;
  const auto add_planes = [&](int64_t rows, int64_t* data, int64_t* words) -> Status {
    PlanesLayout layout;
    if (Status status = planes_layout(rows, k, planes(), &layout); !status.ok()) return status;
    fits = fits && arena_.add(layout.plane_bytes, data) && arena_.add(layout.word_bytes, words);
    return {};
  };
  if (splits_x()) {
    if (Status status = add_planes(m, &x_planes_, &x_words_); !status.ok()) return status;
  }
  if (splits_weight()) {
    if (Status status = add_planes(n, &weight_planes_, &weight_words_); !status.ok()) return status;
  }
  if (training() || reduces_rows()) {
    static_assert(sizeof(Moments) == sizeof(LogSumExpPartial));
    int64_t bytes = 0;
    fits = fits &&
           checked_multiply(reduces_rows() ? m : n, partial_count() * int64_t(sizeof(Moments)),
                            &bytes) &&
           arena_.add(bytes, &partials_);
  }
  if (splits_k()) {
    int64_t bytes = 0;
    fits = fits && checked_multiply(slice_stride(), policy_.split_k * int64_t(4), &bytes) &&
           arena_.add(bytes, &slices_);
  }
  if (folds_ahead()) fits = fits && arena_.add(n * int64_t(sizeof(float2)), &folded_);
  if (counts() > 0) fits = fits && arena_.add(counts() * int64_t(sizeof(uint32_t)), &counts_);
  if (!fits) {
    return error(Code::kInvalidValue, "the workspace of %s needs more than 2^63 bytes",
                 to_string(problem_.gemm).c_str());
  }
  if (!tensor_cores()) return {};
  gemm::OperandLayout layout{leading_of(problem_.x_leading, k),
                             leading_of(problem_.weight_leading, k), links_.images};
  if (turned()) std::swap(layout.a_leading, layout.b_leading);
  gemm_ = gemm::find_instance(policy_)->bind(multiplied(problem_.gemm, policy_), policy_, layout,
                                             device_);
  return {};
}

SplitJob FusedPlan::x_job(const FusedBuffers& buffers) const {
  return {buffers.x, problem_.gemm.m, at<void>(buffers.workspace, x_planes_),
          at<int32_t>(buffers.workspace, x_words_)};
}

SplitJob FusedPlan::weight_job(const FusedBuffers& buffers) const {
  return {buffers.weight, problem_.gemm.n, at<void>(buffers.workspace, weight_planes_),
          at<int32_t>(buffers.workspace, weight_words_)};
}

bool FusedPlan::trails(const FusedBuffers& buffers) const {
  return policy_.trailing_blocks != 0 &&
         can_trail(trailing_.of_x ? buffers.x : buffers.weight, problem_.gemm.k);
}

Status FusedPlan::split_operands(const FusedBuffers& buffers, bool trails,
                                 void* stream) const noexcept {
  const int64_t k = problem_.gemm.k;
  SplitJob x = x_job(buffers);
  SplitJob weight = weight_job(buffers);
  if (trails) (trailing_.of_x ? x : weight).first_rows = trailing_.first_row;
  if (splits_x()) {
    Counters zeros;
    if (counts() > 0) zeros = {at<uint32_t>(buffers.workspace, counts_), counts()};
    return split(x, splits_weight() ? &weight : nullptr, k, planes(), zeros, stream);
  }
  return splits_weight() ? split(weight, nullptr, k, planes(), {}, stream) : Status{};
}

Status FusedPlan::split_last_rows(const FusedBuffers& buffers, gemm::GemmCall* call,
                                  void* stream) const noexcept {
  const SplitJob job = trailing_.of_x ? x_job(buffers) : weight_job(buffers);
  auto* arrived = at<uint32_t>(buffers.workspace, counts_) + exchange_counts();
  call->follows_fold = false;  // but this
  // No tile is waited for where no row is left.
  const int64_t first_tile = ceil_div(trailing_.first_row, trailing_.tile_rows);
  call->arriving = {arrived, trailing_.of_x, static_cast<int32_t>(job.rows),
                    static_cast<int32_t>(first_tile)};
  return split_trailing(job, problem_.gemm.k, planes(),
                        {trailing_.first_row, trailing_.tile_rows, arrived},
                        policy_.trailing_blocks, stream);
}

Status FusedPlan::launch(const FusedBuffers& buffers, const Linked& linked,
                         void* stream) const noexcept {
  const FusedPlan& plan = running(buffers);
  Prepared prepared;
  if (Status status = plan.prepare(buffers, linked, &prepared, stream); !status.ok()) return status;
  return plan.multiply(buffers, &prepared, stream);
}

Status FusedPlan::prepare(const FusedBuffers& buffers, const Linked& linked, Prepared* prepared,
                          void* stream) const noexcept {
  if (empty()) {
    return {};
  }
  if (Status status = check(buffers); !status.ok()) return status;
  gemm::GemmCall& call = prepared->call;
  if (Status status = bind(buffers, linked, &call, &prepared->after); !status.ok()) {
    return status;
  }
  const bool trails = this->trails(buffers);
  if (planes() > 0) {
    if (Status status = split_operands(buffers, trails, stream); !status.ok()) return status;
  }
  gemm::EpilogueArguments& epilogue = call.epilogue;
  if (folds_ahead() && (epilogue.affine_steps > 0 || epilogue.exchange.clears > 0)) {
    auto* folded = at<float2>(buffers.workspace, folded_);
    if (Status status = gemm::fold_columns(epilogue, problem_.gemm.n, folded, stream);
        !status.ok()) {
      return status;
    }
    epilogue.folded = folded;
    call.follows_fold = true;
  }
  if (!trails) return {};
  if (epilogue.exchange.arrivals != nullptr) {
    epilogue.exchange.gathering = at<uint32_t>(buffers.workspace, counts_) + counts() - 2;
    epilogue.exchange.blocks = static_cast<uint32_t>(call.blocks);
  }
  return split_last_rows(buffers, &call, stream);
}

Status FusedPlan::multiply(const FusedBuffers& buffers, Prepared* prepared,
                           void* stream) const noexcept {
  if (empty()) {
    return {};
  }
  const auto [m, n, k, precision, dtype] = problem_.gemm;
  gemm::GemmCall& call = prepared->call;
  gemm::EpilogueArguments& epilogue = call.epilogue;
  if (simt()) {
    return simt::multiply(buffers.x, buffers.weight, m, n, k, simt_tile(policy_), policy_.cluster_m,
                          epilogue.program, buffers.out, stream);
  }
  if (splits_k()) {
    const DeviceProgram program = epilogue.program;
    epilogue.program = {};
    epilogue.affine_steps = 0;
    if (Status status = skinny()
                            ? skinny::multiply(buffers.x, buffers.weight, m, n, k, policy_.split_k,
                                               epilogue.out, slice_stride(), stream)
                            : gemm_->launch(call, stream);
        !status.ok()) {
      return status;
    }
    return apply(program, epilogue.out, policy_.split_k, slice_stride(), buffers.out, m, n,
                 device_.sm_count, stream);
  }
  if (Status status = gemm_->launch(call, stream); !status.ok()) return status;
  if (reduces_rows()) {
    return row_reduce::merge(epilogue.row_partials, m, partial_count(), buffers.out.data,
                             buffers.out.dtype, stream);
  }
  const gemm::MomentExchange& exchange = epilogue.exchange;
  const bool exchanges = exchange.arrivals != nullptr;
  if (!training() || (exchanges && exchange.gathering == nullptr)) {
    return {};
  }
  if (links_.reads_images && links_.images.planes_out) {
    const batch_norm::Planes planes{buffers.out.data, buffers.out.dtype, links_.images.count, n,
                                    links_.images.out_pixels()};
    return batch_norm::normalise_planes(planes, epilogue.partials, partial_count(),
                                        buffers.batch_norm, prepared->after, stream);
  }
  batch_norm::Partials partials{epilogue.partials, partial_count(), partial_rows(),
                                partial_count()};
  if (exchanges) {
    partials.column_stride = 1;
    partials.stride = n;
    partials.gathering = exchange.gathering + 1;
  }
  return batch_norm::normalise(buffers.out, m, n, partials, buffers.batch_norm, prepared->after,
                               device_.sm_count, stream);
}

Status make(const FusedProblem& problem, const DeviceProps& device, const GemmPolicy* forced,
            const Links& links, std::unique_ptr<FusedPlan>* plan) noexcept {
  if (Status status = why_not(problem, device); !status.ok()) return status;
  try {
    FusedProblem canonical = problem;
    canonical.program = canonicalise(problem.program);
    canonical.after = canonicalise(problem.after);
    const GemmPolicy policy = forced != nullptr ? *forced : select_policy(canonical, links, device);
    if (Status status = check(canonical, policy, links, device); !status.ok()) return status;
    auto made = std::make_unique<FusedPlan>(canonical, device, policy, links);
    if (Status status = made->lay_out(); !status.ok()) return status;
    if (policy.source == Source::kTurned) {
      auto other = std::make_unique<FusedPlan>(
          canonical, device, select_straight_policy(canonical, links, device), links);
      if (Status status = other->lay_out(); !status.ok()) return status;
      made->otherwise(std::move(other));
    }
    *plan = std::move(made);
  } catch (const std::bad_alloc&) {
    return error(Code::kOutOfMemory, "no host memory for the plan");
  }
  return {};
}

}  // namespace fused

Status why_not(const FusedProblem& problem, const DeviceProps& device) noexcept {
  if (Status status = validate(problem.gemm); !status.ok()) return status;
  if (Status status = validate(problem.program, kMaxSteps); !status.ok()) return status;
  if (Status status = validate(problem.after, kMaxSteps); !status.ok()) return status;
  CUTFUSE_CHECK(problem.tail == Tail::kNone || problem.tail == Tail::kBatchNormTrain ||
                    problem.tail == Tail::kBatchNormEval || problem.tail == Tail::kLogSumExp,
                Code::kInvalidValue,
                "unknown tail %d; this build has 0 (none), 1 and 2 "
                "(batch_norm in training and in eval) and 3 (logsumexp)",
                static_cast<int>(problem.tail));
  if ((problem.tail == Tail::kNone || problem.tail == Tail::kLogSumExp) &&
      problem.after.count > 0) {
    return error(Code::kInvalidValue,
                 "%d steps after a tail that is none or logsumexp; append them to the first "
                 "program or apply them to the result",
                 problem.after.count);
  }
  if (problem.tail == Tail::kBatchNormTrain && problem.gemm.m < 2) {
    return error(Code::kInvalidValue,
                 "Expected more than 1 value per channel when training, got %lld rows",
                 static_cast<long long>(problem.gemm.m));
  }
  const int64_t n = problem.gemm.n;
  const bool passes = problem.tail == Tail::kBatchNormTrain || fused::is_skinny(problem);
  CUTFUSE_CHECK(n <= row_tile::kMaxColumns || !passes, Code::kNotSupported,
                "N=%lld: a pass over the result takes at most %lld columns; split the features",
                static_cast<long long>(n), static_cast<long long>(row_tile::kMaxColumns));
  const bool narrow = problem.gemm.dtype != DType::kFloat32;
  for (const int64_t leading : {problem.x_leading, problem.weight_leading}) {
    CUTFUSE_CHECK(leading == 0 || (narrow && leading % 8 == 0 && leading >= problem.gemm.k),
                  Code::kInvalidValue,
                  "rows %lld elements apart: 16-bit operands need a multiple of 8 that is at least "
                  "K, fp32 ones 0",
                  static_cast<long long>(leading));
  }
  GemmProblem gemm = problem.gemm;
  // fp32 units keep the promise of accuracy at any K.
  if (fused::is_simple(problem, {}) && gemm.k > 0) gemm.k = std::max(gemm.k, kMinK);
  return why_not(gemm, device);
}

Status fused::why_not_linked(const FusedProblem& problem, const DeviceProps& device) noexcept {
  if (Status status = cutfuse::why_not(problem, device); !status.ok()) return status;
  return cutfuse::why_not(problem.gemm, device);
}

Status make_plan(const FusedProblem& problem, const DeviceProps& device, const GemmPolicy* forced,
                 Plan** plan) noexcept {
  *plan = nullptr;
  std::unique_ptr<fused::FusedPlan> made;
  if (Status status = fused::make(problem, device, forced, {}, &made); !status.ok()) return status;
  *plan = made.release();
  return {};
}

void destroy_plan(Plan* plan) noexcept { delete plan; }

Status run(const Plan& plan, const FusedBuffers& buffers, void* stream) noexcept {
  CurrentDevice device;
  if (Status status = device.enter(plan.device().index); !status.ok()) return status;
  return static_cast<const fused::FusedPlan&>(plan).launch(buffers, {}, stream);
}

}  // namespace cutfuse
