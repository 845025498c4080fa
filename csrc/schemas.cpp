// Definitions of the operators, so that an exported program runs in a process without the Python package.
//
// The package loads this library first and defines only what is missing.
#include "arguments.h"
#include "glue.h"

namespace addnorm {
namespace {

const Library definitions(kSchemas);

}  // namespace
}  // namespace addnorm
