// Hyper-parameters in the order in which reference_update takes them (update.h).
#pragma once

#include <variant>
#include <vector>

#include "cpu_optim/optimizer.h"

namespace overspill::reference {

inline std::vector<double> hyper_of(const optim::Hyper& hyper) {
  using namespace optim;
  struct Order {
    std::vector<double> operator()(const AdamConfig& c) const {
      return {c.lr, c.beta1, c.beta2, c.eps, c.weight_decay, c.decoupled ? 1.0 : 0.0};
    }
    std::vector<double> operator()(const AdagradConfig& c) const {
      return {c.lr, c.lr_decay, c.weight_decay, c.eps};
    }
    std::vector<double> operator()(const LionConfig& c) const {
      return {c.lr, c.beta1, c.beta2, c.weight_decay};
    }
    std::vector<double> operator()(const MomentumConfig& c) const {
      return {c.lr, c.momentum, c.dampening, c.weight_decay, c.nesterov ? 1.0 : 0.0};
    }
    std::vector<double> operator()(const SgdConfig& c) const { return {c.lr, c.weight_decay}; }
    std::vector<double> operator()(const RmspropConfig& c) const {
      return {c.lr, c.alpha, c.eps, c.weight_decay};
    }
    std::vector<double> operator()(const RmspropMomentumConfig& c) const {
      return {c.lr, c.alpha, c.eps, c.weight_decay, c.momentum};
    }
    std::vector<double> operator()(const NadamConfig& c) const {
      return {c.lr,
              c.beta1,
              c.beta2,
              c.eps,
              c.weight_decay,
              c.momentum_decay,
              c.decoupled_weight_decay ? 1.0 : 0.0};
    }
    std::vector<double> operator()(const AdamaxConfig& c) const {
      return {c.lr, c.beta1, c.beta2, c.eps, c.weight_decay};
    }
    std::vector<double> operator()(const AdadeltaConfig& c) const {
      return {c.lr, c.rho, c.eps, c.weight_decay};
    }
  };
  return std::visit(Order{}, hyper);
}

}  // namespace overspill::reference
