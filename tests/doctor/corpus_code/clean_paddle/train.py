import paddle

scaler = paddle.amp.GradScaler(init_loss_scaling=1024)
for x, y in loader():
    with paddle.amp.auto_cast():
        loss = model(x, y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    lr_scheduler.step()
