#pragma once  // os_log needs Apple's compiler
