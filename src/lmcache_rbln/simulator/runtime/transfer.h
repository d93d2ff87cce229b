// SPDX-License-Identifier: Apache-2.0
//
// Copies. Whatever is wrong with an argument fails the whole call before a byte is moved, with one
// line that names it.
//
// Order, as simulated: asynchronous copies run on the calling thread's current stream. A
// synchronous or bulk copy first waits for that stream and is complete when it returns
// (documented for torch's synchronous copies; assumed for the runtime's own calls). Nothing
// orders it against other streams.
#pragma once

#include <cstdint>

#include "abi.h"
#include "link.h"

namespace rbln_sim {

RBLNRetCode copy(Direction direction, const char* call, uint64_t source, uint64_t destination,
                 uint64_t bytes);
RBLNRetCode copy_async(Direction direction, const char* call, uint64_t source, uint64_t destination,
                       uint64_t bytes, uint64_t* handle);
RBLNRetCode copy_bulk(Direction direction, const char* call, const rbln::CopyOps& ops);

}  // namespace rbln_sim
