#include "bindings/bindings.h"

PYBIND11_MODULE(_core, m) {
  m.doc() = "The engine of overspill. Bytes move here, with the GIL released.";
  overspill::bindings::register_errors(m);
  overspill::bindings::register_report(m);
  overspill::bindings::register_engine(m);
  overspill::bindings::register_checkpoint(m);
  overspill::bindings::register_doctor(m);
  overspill::bindings::register_optim(m);
  overspill::bindings::register_frames(m);
  overspill::bindings::register_ranks(m);
  overspill::bindings::register_inference(m);
  overspill::bindings::register_batch(m);  // after the model, which a batch takes
}
