/* opaq/opaq.h: the whole public interface. */
#ifndef OPAQ_OPAQ_H
#define OPAQ_OPAQ_H

#include "opaq/checkpoint_config.h"
#include "opaq/cpu.h"
#include "opaq/element.h"
#include "opaq/execution.h"
#include "opaq/experts.h"
#include "opaq/format.h"
#include "opaq/kernel.h"
#include "opaq/layout.h"
#include "opaq/linear.h"
#include "opaq/noise.h"
#include "opaq/op.h"
#include "opaq/parallel.h"
#include "opaq/pattern.h"
#include "opaq/plan_text.h"
#include "opaq/proto.h"
#include "opaq/quant.h"
#include "opaq/runner.h"
#include "opaq/spec.h"
#include "opaq/status.h"
#include "opaq/stored.h"
#include "opaq/tensor.h"
#include "opaq/version.h"

#endif
