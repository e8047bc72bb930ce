#include "engine/plan/setup.h"

#include <utility>

namespace overspill::engine {

Setup::Setup(Layout layout_in, Plan plan_in, Config config_in, DeviceTraits traits_in)
    : layout(std::move(layout_in)),
      plan(std::move(plan_in)),
      config(std::move(config_in)),
      traits(traits_in) {
  for (int32_t unit = 0; unit < std::ssize(layout.units); ++unit) {
    weight_places_.push_back(engine::weight_place(layout, plan, traits, unit));
    gradient_routes_.push_back(engine::gradient_route(layout, plan, unit));
  }
}

}  // namespace overspill::engine
